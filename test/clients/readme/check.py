"""Runs the examples of README.md as a reader would, and compares what they print with what the README shows.

   check.py CHECKOUT DATABASE WORKFOLDER

sh    a block that begins with psql is run, in a database of its own
sql   all of them in one session of psql; none may end with an error
text  what the sql block before it prints; ids and spaces do not count
js    is found, word for word, in docs/examples/worker.mjs
"""
import os
import pathlib
import re
import subprocess
import sys

TOUR = "outbox_tour"  # the database that the README makes
MARK = "end of block"


def blocks(text):
    """Language, content and line of each fenced block."""
    for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        yield match[1], match[2], text.count("\n", 0, match.start()) + 1


def normal(text):
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", text)
    text = re.sub(r"^\(\d+ rows?\)$", "", text, flags=re.MULTILINE)
    text = re.sub(r"[-+]{2,}", "--", text)
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def psql(arguments, database, **more):
    environment = dict(os.environ, PGDATABASE=database)
    return subprocess.run(["psql", "-X", *arguments], env=environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, **more)


def maintain(sql):
    result = psql(["-q", "-v", "ON_ERROR_STOP=1", "-c", "set client_min_messages = warning", "-c", sql],
                  os.environ.get("PGDATABASE", "postgres"))
    if result.returncode != 0:
        sys.exit(result.stdout)


class Readme:
    def __init__(self, top, database, folder):
        self.top = top
        self.database = database
        self.folder = folder
        self.blocks = list(blocks((top / "README.md").read_text(encoding="utf-8")))
        self.failures = []

    def fail(self, line, what, text=""):
        self.failures.append(line)
        print(f"not ok - README.md:{line}: {what}\n{text}")

    def commands(self):
        for language, content, line in self.blocks:
            if language == "sh" and content.startswith("psql"):
                result = subprocess.run(["bash", "-c", content], env=dict(os.environ, PGDATABASE=self.database), text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                if result.returncode != 0 or not re.search(r"^\(1 row\)\s*\Z", result.stdout, re.MULTILINE):
                    self.fail(line, "the command fails or returns nothing", result.stdout)
                else:
                    print(f"ok - README.md:{line}: {content.strip()}")

    def session(self):
        """The output of each sql block: they share a session, as they do for a reader."""
        script = self.folder / "tour.sql"
        with open(script, "w", encoding="utf-8") as file:
            print("\\set QUIET on", file=file)
            for language, content, _ in self.blocks:
                if language == "sql":
                    print(f"{content}\\echo {MARK}", file=file)
        tour = self.database + "_tour"
        script.write_text(script.read_text(encoding="utf-8").replace(TOUR, tour), encoding="utf-8")
        # the first one is the installation, in this database
        return psql(["-f", str(script)], self.database).stdout.split(MARK + "\n")

    def examples(self):
        outputs = self.session()
        position = 0
        for index, (language, content, line) in enumerate(self.blocks):
            if language != "sql":
                continue
            output, position = outputs[position], position + 1
            following = self.blocks[index + 1] if index + 1 < len(self.blocks) else ("", "", 0)
            output = re.sub(r"^psql:\S+?:\d+: ", "", output, flags=re.MULTILINE)
            shown = "\n".join(row for row in output.splitlines() if not re.match(r"(NOTICE|DETAIL|HINT):", row))
            if following[0] == "text" and following[2] == line + content.count("\n") + 2:
                if normal(shown) != normal(following[1]):
                    self.fail(line, "prints something else", output)
                    continue
            elif re.search(r"^(ERROR|FATAL):", output, re.MULTILINE):
                self.fail(line, "ends with an error", output)
                continue
            print(f"ok - README.md:{line}: SQL")

    def excerpts(self):
        program = (self.top / "docs/examples/worker.mjs").read_text(encoding="utf-8")
        for language, content, line in self.blocks:
            if language == "js" and content not in program:
                self.fail(line, "is not in docs/examples/worker.mjs")

    def run(self):
        try:
            maintain(f"create database {self.database}")
            self.commands()
            maintain(f"drop database {self.database} with (force)")
            maintain(f"create database {self.database}")
            self.examples()
        finally:
            maintain(f"drop database if exists {self.database} with (force)")
            maintain(f"drop database if exists {self.database}_tour with (force)")
        self.excerpts()
        return 1 if self.failures else 0


sys.exit(Readme(pathlib.Path(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])).run())
