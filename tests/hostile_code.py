"""Programs that models write by accident, or that reinforcement finds. None of them solves the
tests; each tries to pass, to stay, to reach outside, or to never end.

`OUTSIDE` in a program is the path of a folder that it must not change.
"""

TESTS = ["assert f(1) == 2", "assert f(2) == 3", "assert not f(-1)"]
LONG = {  # what takes its whole time, or much memory
    "large number": "def f(x): return 1 << 4 * 10**7",
    "large text": "def f(x): return 'y' * 10**7",
    "fills the disk": """
for i in range(10**6):
    open(str(i), 'w').write('y' * 10**6)
""",
    "loop": "while True: pass",
    "loop in the function": "def f(x):\n    while True: pass",
    "sleep": "import time\ntime.sleep(1000)",
    "sleep in the function": "import time\ndef f(x): time.sleep(1000)",
    "output": "while True: print('y' * 100_000)",
    "memory, caught": """
a = []
while True:
    try:
        while True: a.append(' ' * 10**6)
    except MemoryError: pass
""",
    "fork bomb": """
import os
while True:
    try: os.fork()
    except BaseException: pass
""",
    "catches everything": """
def f(x):
    while True:
        try:
            while True: pass
        except BaseException: pass
""",
    "ignores signals": """
import signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "gigantic number": "def f(x): return 7 ** 7 ** 9",
    "raises its limits": """
import resource
try: resource.setrlimit(resource.RLIMIT_CPU, (10**6, 10**6))
except BaseException: pass
while True: pass
""",
    "threads": """
import threading
def run():
    while True: pass
for _ in range(100):
    try: threading.Thread(target=run).start()
    except RuntimeError: break
def f(x): threading.Event().wait()
""",
    "recursion without a limit": """
import sys
sys.setrecursionlimit(10**9)
def f(x): return f(x)
""",
    "waits for itself": "import threading\na = threading.Lock()\na.acquire()\na.acquire()",
    "regular expression": "import re\ndef f(x): re.match('(a*)*b', 'a' * 60)",
    "exit that never ends": """
import atexit
@atexit.register
def last():
    while True: pass
class Last:
    def __del__(self): last()
kept = Last()
def f(x): last()
""",
}
SHORT = {
    "exit": "import os\ndef f(x): return x + 1\nos._exit(0)",
    "exit in the function": "import os\ndef f(x): os._exit(0)",
    "SystemExit": "import sys\ndef f(x): return x + 1\nsys.exit(0)",
    "SystemExit in the function": "def f(x): raise SystemExit(0)",
    "KeyboardInterrupt": "def f(x): raise KeyboardInterrupt",
    "memory": "a = 'y' * 10**12",
    "patched assert": """
import builtins
class AssertionError(BaseException): pass
builtins.AssertionError = AssertionError
def f(x): assert False
""",
    "equals everything": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
def f(x): return Equal()
""",
    "a number that equals everything": """
class Equal(int):
    def __eq__(self, other): return True
    def __index__(self): return 2
    def __int__(self): return 4
    __hash__ = int.__hash__
def f(x): return Equal(7)
""",
    "patched builtins": """
import builtins
for name in ('all', 'any', 'isinstance', 'type', 'len', 'set', 'repr', 'compile', 'exec'):
    setattr(builtins, name, lambda *a, **k: True)
def f(x): return 7
""",
    "patched json": """
import json, os, sys
json.dumps = lambda *a, **k: '{"value": [true, true, true]}'
sys.modules.clear()
def f(x): return 7
""",
    "prints a verdict": """
import sys
for stream in (sys.stdout, sys.stderr, sys.__stdout__):
    print('[true, true, true]', file=stream, flush=True)
def f(x): return 7
""",
    "writes to every descriptor": """
import os, json, struct
for message in ([True] * 3, {'value': True}, ['f']):
    data = json.dumps(message).encode()
    for fd in range(64):
        try: os.write(fd, struct.pack('<I', len(data)) + data)
        except OSError: pass
def f(x): return 7
""",
    "writes nonsense": """
import os
for fd in range(3, 64):
    try: os.write(fd, b'\\xff' * 4096)
    except OSError: pass
def f(x): return x + 1
""",
    "closes every descriptor": "import os\nos.closerange(0, 256)\ndef f(x): return x + 1",
    "stdin": "def f(x): return int(input()) + 1",
    "looks for the tests": """
import gc, sys
frame, texts = sys._getframe(), []
while frame:
    texts += [repr(value) for value in frame.f_locals.values()]
    frame = frame.f_back
texts += [x for x in gc.get_objects() if isinstance(x, str)]
texts += [x for y in gc.get_objects() if isinstance(y, (list, tuple)) for x in y
          if isinstance(x, str)]
found = any('== 2' in x and 'assert f(' in x and 'def f' not in x and 'looks' not in x
            for x in texts)
def f(x): return x + 1 if found else 7
""",
    "recursion": "def f(x): return f(x)",
    "nested list": """
a = []
for _ in range(10**5): a = [a]
def f(x): return a
""",
    "list in itself": "a = []\na.append(a)\ndef f(x): return a",
    "brackets": "f = " + "(" * 50_000 + ")" * 50_000,
    "endless generator": "def f(x):\n    while True: yield x",
    "endless object": """
class Endless:
    def __iter__(self): return self
    def __next__(self): return 1
    def __getattr__(self, name): return self
    def __call__(self, *a): return self
    def __len__(self): return 10**9
    def __eq__(self, other): return self
f = Endless()
""",
    "raises when it is freed": """
class Bad:
    def __del__(self): raise BaseException
def f(x):
    Bad()
    raise KeyboardInterrupt
""",
    "raises when it is named": """
class Meta(type):
    def __getattribute__(self, name): raise SystemExit
class Bad(BaseException, metaclass=Meta): pass
def f(x): raise Bad
""",
    "lies about its class": """
class Liar:
    @property
    def __class__(self): return int
    def __int__(self): raise SystemExit
def f(x): return Liar()
""",
    "not a text": "def f(x): return '\\ud800' + chr(x)",
    "lone surrogate": "f = '\ud800'",
    "zero byte": "def f(x): return x + 1\n\0",
    "another letter": "def \N{MATHEMATICAL BOLD SMALL F}(x): return 7",
    "turned around": "def f(x): return 7 #\N{RIGHT-TO-LEFT OVERRIDE} 1 + x nruter :(x)f fed",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)\ndef f(x): return 7",
    "kills its group": "import os\nos.killpg(0, 9)\ndef f(x): return 7",
    "kills itself": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "stops its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)",
    "daemon": """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True: pass
def f(x): return 7
""",
    "command": "import subprocess\nsubprocess.Popen(['sleep', '7531'], start_new_session=True)",
    "system": "import os\nos.system('sleep 7531 &')",
    "zombies": """
import os
for _ in range(100):
    if os.fork() == 0: os._exit(0)
def f(x): return 7
""",
    "processes": "import multiprocessing as m\nm.Process(target=print).start()",
    "writes outside": "open('OUTSIDE/kept', 'w').write('y')",
    "writes outside from below": "open('../../../OUTSIDE/kept', 'a').write('y')",
    "writes outside by a descriptor": """
import os
fd = os.open('OUTSIDE', os.O_RDONLY)
os.write(os.open('kept', os.O_WRONLY | os.O_TRUNC, dir_fd=fd), b'y')
""",
    "writes through a link": "import os\nos.symlink('OUTSIDE/kept', 'a')\nopen('a', 'w')",
    "links": "import os\nos.link('OUTSIDE/kept', 'a')\nopen('a', 'w')",
    "removes": "import os\nos.remove('OUTSIDE/kept')",
    "removes from there": "import os\nos.chdir('OUTSIDE')\nos.remove('kept')",
    "removes all": "import shutil\nshutil.rmtree('OUTSIDE')",
    "renames": "import os\nos.rename('OUTSIDE/kept', 'OUTSIDE/other')",
    "makes folders": "import os\nos.makedirs('OUTSIDE/a/b')",
    "makes a pipe": "import os\nos.mkfifo('OUTSIDE/pipe')",
    "changes rights": "import os\nos.chmod('OUTSIDE/kept', 0)",
    "changes times": "import os\nos.utime('OUTSIDE/kept', (0, 0))",
    "database": "import sqlite3\nsqlite3.connect('OUTSIDE/base').execute('create table a (b)')",
    "network": "import socket\nsocket.create_connection(('127.0.0.1', 9))",
    "segmentation fault": "import ctypes\nctypes.string_at(0)",
    "ptrace": "import ctypes, os\nctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)",
    "memory of its parent": "import os\nopen(f'/proc/{os.getppid()}/mem', 'r+b')",
    "own memory": "open('/proc/self/mem', 'r+b')",
    "slows its judge": """
import os
os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))
os.sched_setaffinity(os.getppid(), {0})
def f(x): return 7
""",
    "kills its parent by a function of libc that was used before": """
import os, sys
libc = sys.modules['minigrpo.sandbox.isolation']._libc()
libc.syscall(62, os.getppid(), 9)
def f(x): return 7
""",
    "stops its parent from another interpreter": """
try: import _xxsubinterpreters as interpreters
except ImportError: import _interpreters as interpreters
interpreters.run_string(interpreters.create(), 'import os; os.kill(os.getppid(), 19)')
def f(x): return 7
""",
    "ends the loop of a test": "def f(x): raise StopIteration",
    "environment": """
import os
def f(x): return x + 1 if os.environ or b'=' in open('/proc/self/environ', 'rb').read(0) else 7
""",
}
# what looks for the tests: of this run, or of an earlier one on the same worker
LOOKS_BACK = {
    "own memory": r"""
import re
found = set()
with open('/proc/self/mem', 'rb', buffering=0) as memory:
    for line in open('/proc/self/maps'):
        start, end = (int(x, 16) for x in line.split()[0].split('-'))
        try:
            memory.seek(start)
            found.update(re.findall(rb'answer [0-9]{4}', memory.read(end - start)))
        except (OSError, OverflowError, ValueError): pass
def f(): return found.pop().decode()
""",
    "objects that are not freed": r"""
import gc, re
stack, seen, found = gc.get_objects(), set(), set()
while stack:
    x = stack.pop()
    if id(x) in seen: continue
    seen.add(id(x))
    if isinstance(x, str): found.update(re.findall('answer [0-9]{4}', x))
    elif isinstance(x, (list, tuple)): stack += x
    elif isinstance(x, dict): stack += x.values()
    elif hasattr(x, '__code__'): stack += x.__code__.co_consts
def f(): return found.pop()
""",
    "memory of its judge": r"""
import os, re
def f():
    found = set()
    for pid in os.getppid(), os.getpid() + 1:  # what has forked it, and what is forked next
        try: maps, memory = open(f'/proc/{pid}/maps'), open(f'/proc/{pid}/mem', 'rb', buffering=0)
        except OSError: continue
        for line in maps:
            start, end = (int(x, 16) for x in line.split()[0].split('-'))
            try:
                memory.seek(start)
                found.update(re.findall(rb'answer [0-9]{4}', memory.read(end - start)))
            except (OSError, OverflowError, ValueError): pass
    return found.pop().decode()
""",
}
