"""Runs the examples of README.md as a reader would, in the order in which they stand, and compares what they print with
what the README shows.

   check.py CHECKOUT DATABASE HOST PORT PLAIN_HOST PLAIN_PORT

sh    a block of psql, createdb and dropdb is run
sql   all of them in one session of psql; none may end with an error
text  what the block before it prints; ids and spaces do not count
js    is found, word for word, in docs/examples/worker.mjs

A block that begins with "a moment later" is repeated until it prints what is shown. The second server does not preload
the library: the section "Without preloading" is run there. Databases whose names begin with DATABASE are made and left.
"""
import os
import pathlib
import re
import subprocess
import sys
import time

NAMES = ("outbox_tour", "outbox_minute", "outbox_copy")  # databases that the README makes
MARK = "end of block"
PATIENCE = 20
PLAIN = "Without preloading"


class Block:
    def __init__(self, section, language, content, line):
        self.section, self.language, self.content, self.line = section, language, content, line
        self.end = line + content.count("\n") + 1
        self.expected = None
        self.later = bool(re.match(r"(--|#) a moment later\n", content))


def blocks(text):
    """Fenced blocks; a text that follows another block at once is what that one prints."""
    section, found = "", []
    for match in re.finditer(r"^#+ ([^\n]*)$|^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, match.start()) + 1
        if match[1]:
            section = match[1] if match[0].startswith(("## ", "### ")) else section
        elif match[2] == "text" and found and found[-1].end + 1 == line:
            found[-1].expected = match[3]
        else:
            found.append(Block(section, match[2], match[3], line))
    return found


def normal(text):
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", text)
    text = re.sub(r"^\(\d+ rows?\)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"[-+]{2,}", "--", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


class Server:
    """The environment to reach it by, and a session of psql."""

    def __init__(self, host, port, database):
        self.environment = dict(os.environ, PGHOST=host, PGPORT=port, PGDATABASE=database)
        self.shell(f"createdb --maintenance-db=postgres {database}")
        # line by line, so that the end of a block is seen when it comes
        self.psql = subprocess.Popen(["stdbuf", "-oL", "psql", "-X", "-q"], env=self.environment, text=True,
                                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    def shell(self, commands, database=None):
        environment = dict(self.environment, PGDATABASE=database) if database else self.environment
        result = subprocess.run(["bash", "-euc", commands], env=environment, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT)
        return result.stdout if result.returncode == 0 else f"ERROR:  ended with {result.returncode}\n{result.stdout}"

    def sql(self, statements):
        self.psql.stdin.write(f"{statements}\n\\echo {MARK}\n")
        self.psql.stdin.flush()
        output = ""
        for line in self.psql.stdout:
            if line == MARK + "\n":
                return re.sub(r"^psql:\S+?:\d+: ", "", output, flags=re.MULTILINE)
            output += line
        return output + "FATAL:  psql has ended\n"

    def leave(self):
        self.psql.stdin.close()
        self.psql.wait()


class Readme:
    def __init__(self, top, database, main, plain):
        self.top = top
        self.database = database
        self.blocks = blocks((top / "README.md").read_text(encoding="utf-8"))
        self.main = Server(*main, database)
        self.plain = Server(*plain, database)
        self.failures = 0

    def report(self, what, error=None, output=""):
        if error:
            self.failures += 1
            print(f"not ok - {what}: {error}\n{output}")
        else:
            print(f"ok - {what}")

    def renamed(self, text):
        return re.sub("|".join(NAMES), lambda name: f"{self.database}_{name[0]}", text)

    def run_once(self, block):
        server = self.plain if block.section == PLAIN else self.main
        content = self.renamed(block.content)
        if block.language == "sql":
            return server.sql(content)
        # those that name no database have one of their own
        return server.shell(content, self.database if server is self.plain else f"{self.database}_sh")

    def try_block(self, block):
        """An error, or nothing; and the output."""
        output = self.run_once(block)
        shown = "\n".join(row for row in output.splitlines() if not re.match(r"(NOTICE|DETAIL|HINT):", row))
        if block.expected is not None:
            return (None if normal(shown) == normal(block.expected) else "prints something else"), output
        if re.search(r"^(ERROR|FATAL):", output, re.MULTILINE):
            return "ends with an error", output
        if block.language == "sh" and "(0 rows)" in output:
            return "returns nothing", output
        return None, output

    def example(self, block):
        end = time.monotonic() + PATIENCE
        error, output = self.try_block(block)
        while error and block.later and time.monotonic() < end:
            time.sleep(0.02)  # poll
            error, output = self.try_block(block)
        self.report(f"README.md:{block.line}: {block.language}", error, output)

    def worker_without_preloading(self):
        """The one that was started by hand delivers the first minute too, and leaves the database to who wants it."""
        minute, look = [block for block in self.blocks if "outbox_minute" in block.content][:2]
        heredoc = re.search(r"<<'END'\ncreate extension outbox;\n(.*)\nEND\n", minute.content, re.DOTALL)
        self.plain.sql(heredoc[1])
        later = Block(PLAIN, "sql", "-- a moment later\ntable arrived;", look.line)
        later.expected = look.expected
        self.example(later)
        self.plain.leave()
        output = self.plain.shell(f"dropdb --maintenance-db=postgres {self.database}")
        self.report("dropdb beside a worker without preloading", output.startswith("ERROR") and "fails", output)

    def run(self):
        self.main.shell(f"createdb {self.database}_sh")
        self.plain.shell("psql -c 'create extension outbox'")
        program = (self.top / "docs/examples/worker.mjs").read_text(encoding="utf-8")
        for block in self.blocks:
            if block.language == "sql" or re.match(r"(# a moment later\n)?(psql|createdb|dropdb) ", block.content):
                self.example(block)
            elif block.language == "js":
                self.report(f"README.md:{block.line}: js",
                            block.content not in program and "is not in docs/examples/worker.mjs")
        self.worker_without_preloading()
        self.main.leave()
        return 1 if self.failures else 0


top, database, *servers = sys.argv[1:]
sys.exit(Readme(pathlib.Path(top), database, servers[:2], servers[2:]).run())
