"""Runs scripts by pgbench, with prepared statements, and reads what it says."""
import os
import re
import subprocess

CPUS = os.cpu_count() or 1


class Run:
    """What one run of pgbench has found. The time is that of its transactions, without connecting."""

    def __init__(self, output):
        self.tps = float(re.search(r'^tps = ([0-9.]+)', output, re.M).group(1))
        self.transactions = int(re.search(r'actually processed: (\d+)', output).group(1))
        self.seconds = self.transactions / self.tps if self.tps else 0.0


def run(bench, db, scripts, clients=1, seconds=None, transactions=None, variables=None, options='', rate=None, log=None):
    """Runs scripts, a text or a list of (text, weight), until the time is over or each client has done its share.

    `options` are settings of the sessions ('-c name=value'); `log` is the prefix of the files for a line per transaction.
    """
    process, names = start(bench, db, scripts, clients, seconds, transactions, variables, options, rate, log)
    return finish(process, names)


def start(bench, db, scripts, clients=1, seconds=None, transactions=None, variables=None, options='', rate=None, log=None):
    """The same in the background; finish() waits for it."""
    command = ['pgbench', '-n', '-M', 'prepared', '-c', str(clients), '-j', str(min(clients, CPUS))]
    command += ['-t', str(transactions)] if transactions else ['-T', str(seconds)]
    if rate:
        command += ['--rate', str(rate)]
    if log:
        command += ['--log', '--log-prefix', log]
    for name, value in (variables or {}).items():
        command += ['-D', f'{name}={value}']
    names = []
    for text, weight in [(scripts, 1)] if isinstance(scripts, str) else scripts:
        names.append(bench.write(text))
        command += ['-f', f'{names[-1]}@{weight}']
    environment = dict(os.environ, PGOPTIONS=options)
    process = subprocess.Popen(command + [db.name], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return process, names


def finish(process, names=()):
    output, errors = process.communicate()
    for name in names:
        os.unlink(name)
    if process.returncode or 'aborted' in errors:
        wrong = [line for line in errors.splitlines() if 'error' in line.lower() or 'aborted' in line]
        raise RuntimeError('pgbench: ' + ('; '.join(wrong[:3]) or errors[-500:]))
    return Run(output)


def loading(name):
    """Lines that fetch an array of payloads into :payloads, once per client: too long for the command line."""
    return f"\\if :loaded\n\\else\nselect value as payloads from bench.input where name = '{name}' \\gset\n\\set loaded 1\n\\endif\n"
