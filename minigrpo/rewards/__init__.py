from ..fen import is_valid_fen as is_valid_fen
