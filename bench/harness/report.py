"""Writes results.json, report.md and the plots into the results folder, and the table of goals to the terminal."""
import json
import os
import platform
import subprocess
import time

from . import plot
from .goals import GOALS
from .results import Spread


def write(bench):
    folder = bench.options.results
    os.makedirs(folder, exist_ok=True)
    about = environment(bench)
    goals = [judged(goal, bench.results) for goal in GOALS if goal.scenario in bench.options.only]
    plots = draw(bench, folder)
    with open(os.path.join(folder, 'results.json'), 'w', encoding='utf-8') as file:
        json.dump({'about': about, 'goals': goals, 'records': bench.results.records, 'ratios': ratios(bench),
                   'skipped': bench.results.skipped, 'broken': bench.results.broken}, file, indent=1)
        file.write('\n')
    with open(os.path.join(folder, 'report.md'), 'w', encoding='utf-8') as file:
        file.write(markdown(bench, about, goals, plots))
    print('\n' + '\n'.join(goal_table(goals)))
    for broken in bench.results.broken:
        print(f"BROKEN: {broken['scenario']} {broken['peer']} {broken['params']}: {broken['error']}")
    print(f"\n{bench.seconds['all']:.0f} s; results in {folder}")


def environment(bench):
    """What the figures depend on."""
    server = bench.server.admin
    cpu = next((line.split(':')[1].strip() for line in open('/proc/cpuinfo', encoding='utf-8') if line.startswith('model name')), '')
    memory = next(int(line.split()[1]) // 1024 for line in open('/proc/meminfo', encoding='utf-8') if line.startswith('MemTotal'))
    changed = server.run("""select name, current_setting(name) from pg_settings
        where source = 'configuration file' and name !~ '(directories|port|^lc_|^log_|address|text_search|TimeZone|DateStyle)'
        order by name""")
    return {
        'date': time.strftime('%Y-%m-%d %H:%M %Z'), 'quick': bench.quick, 'rounds': bench.rounds, 'seconds': bench.seconds,
        'commit': output(['git', '-C', os.environ['OUTBOX_TOP'], 'describe', '--always', '--dirty']),
        'server': server.value('select version()'), 'cpus': os.cpu_count(), 'cpu': cpu, 'memory_mb': memory, 'kernel': platform.release(),
        'load_average_at_the_end': os.getloadavg()[0], 'settings': dict(changed), 'peers': bench.versions,
    }


def output(command):
    try:
        return subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL).strip()
    except (OSError, subprocess.CalledProcessError):
        return 'unknown'


def judged(goal, results):
    spread, verdict = goal.judge(results)
    return {'scenario': goal.scenario, 'goal': goal.text, 'seen': goal.seen, 'bound': goal.bound_text(), 'unit': goal.unit,
            'reached': spread.as_dict() if spread else None, 'verdict': verdict}


def ratios(bench):
    """Each record of outbox against the same of every other peer, round by round."""
    found = []
    for record in bench.results.records:
        if record['peer'] == 'outbox':
            continue
        own = bench.results.find(record['scenario'], record['measure'], 'outbox', **record['params'])
        if own and all(record['values']):
            ratio = Spread(a / b for a, b in zip(own[0]['values'], record['values']))
            found.append({'scenario': record['scenario'], 'measure': record['measure'], 'params': record['params'],
                          'outbox_against': record['peer'], **ratio.as_dict()})
    return found


def short(value, unit=''):
    if unit == '×':
        return f'{value:.2f}'
    return f'{value:,.0f}' if abs(value) >= 100 else f'{value:.3g}'


def goal_table(goals):
    lines = ['| | | seen so far | goal | reached (min – max) | |', '|---|---|---|---|---|---|']
    for goal in goals:
        reached = goal['reached']
        unit = goal['unit']
        said = f"{short(reached['median'], unit)} {unit} ({short(reached['min'], unit)} – {short(reached['max'], unit)})" if reached else '–'
        lines.append(f"| {goal['scenario']} | {goal['goal']} | {goal['seen']} | {goal['bound']} | {said} | {goal['verdict']} |")
    return lines


def markdown(bench, about, goals, plots):
    lines = ['# outbox beside others', '',
             f"{about['date']}, commit {about['commit']}, {about['seconds']['all']:.0f} s, {'quick' if bench.quick else 'full'}, "
             f"{about['rounds']} rounds. {about['cpus']} CPUs ({about['cpu']}), {about['memory_mb']} MB, kernel {about['kernel']}. "
             f"{about['server'].split(' on ')[0]}. All figures are medians of the rounds, with minimum and maximum; what is compared was "
             'measured in turn.', '', '## Goals', '']
    lines += goal_table(goals)
    lines += ['', '## Who', '', '| | version | |', '|---|---|---|']
    for peer in [bench.floor] + bench.peers:
        lines.append(f"| {peer.name} | {bench.versions.get(peer.name, '')} | {peer.about} |")
    for letter in bench.options.only:
        lines += section(bench, letter, plots)
    if bench.results.skipped:
        lines += ['', '## Not measured', '', '| | who | why |', '|---|---|---|']
        seen = dict.fromkeys((s['scenario'], s['peer'], s['reason']) for s in bench.results.skipped)
        lines += [f'| {scenario} | {peer} | {reason} |' for scenario, peer, reason in seen]
    if bench.results.broken:
        lines += ['', '## Broken', '']
        lines += [f"- {b['scenario']}, {b['peer']}, {b['params']}: {b['error']}" for b in bench.results.broken]
    lines += ['', '## Settings', '', '```'] + [f'{name} = {value}' for name, value in about['settings'].items()] + ['```', '']
    return '\n'.join(lines)


def section(bench, letter, plots):
    """The scenario's own words, a table per measure with a column per peer, its plots."""
    module = bench.scenario(letter)
    lines = ['', f'## {letter}. {module.TITLE}', '', module.__doc__.strip(), '']
    records = [record for record in bench.results.records if record['scenario'] == letter]
    for name in plots.get(letter, []):
        lines += [f'![{name}]({name})', '']
    for measure in dict.fromkeys(record['measure'] for record in records):
        lines += table(measure, [record for record in records if record['measure'] == measure])
    return lines


def table(measure, records):
    peers = list(dict.fromkeys(record['peer'] for record in records))
    keys = list(dict.fromkeys(key for record in records for key in record['params'] if key != 'messages'))
    rows = {}
    for record in records:
        row = tuple(str(record['params'].get(key, '')) for key in keys)
        rows.setdefault(row, {})[record['peer']] = record
    lines = [f'**{measure}**, {records[0]["unit"]}', '', '| ' + ' | '.join(keys + peers) + ' |', '|' + '---|' * (len(keys) + len(peers))]
    for row, found in rows.items():
        lines.append('| ' + ' | '.join(list(row) + [cell(found.get(peer)) for peer in peers]) + ' |')
    return lines + ['']


def cell(record):
    if record is None:
        return ''
    if len(record['values']) == 1:
        return short(record['median'])
    return f"{short(record['median'])} ({short(record['min'])} – {short(record['max'])})"


def draw(bench, folder):
    """Plots by scenario; a scenario that was not run has none."""
    plots = {}

    def save(letter, name, content):
        with open(os.path.join(folder, name), 'w', encoding='utf-8') as file:
            file.write(content)
        plots.setdefault(letter, []).append(name)
    results = bench.results
    names = [peer.name for peer in bench.peers]
    groups = grouped(results.find('a', 'enqueue', clients=4, size=250), names, 'commit', lambda r: r['median'], base='floor')
    if groups:
        save('a', 'enqueue.svg', plot.bars('Enqueue, 4 clients, against a bare INSERT', 'ratio', labelled(groups, 'commit {}'), names, mark=1))
    groups = grouped([r for r in results.find('c', 'claim', settle='batch', commit='off') if r['params']['consumers'] == 1 or r['params']['batch'] == 1],
                     names, 'batch', lambda r: r['median'] / 1000)
    if groups:
        save('c', 'claim.svg', plot.bars('Claim and settle, by batch', 'thousand messages/s', labelled(groups, 'batch {}'), names))
    for variant, title in (('snapshot', 'an open snapshot'), ('writer', 'an open transaction that has enqueued')):
        series = {r['peer']: r['series'] for r in results.find('e', 'loop', variant=variant)}
        if series:
            save('e', f'{variant}.svg', plot.lines(f'Behind {title}', 'messages that have passed', 'messages/s', series, log_y=True))
    series = {}
    for record in results.find('f', 'latency of claim, p99', analyze='before'):
        series.setdefault(record['peer'], []).append((record['params']['backlog'], record['median']))
    if series:
        save('f', 'backlog.svg', plot.lines('claim(10), p99, statistics of an empty table', 'backlog', 'ms', series, True, True))
    series = {r['peer']: r['series'] for r in results.find('h', 'steady')}
    if series:
        save('h', 'steady.svg', plot.lines('Producers beside consumers', 'seconds', 'messages/s', series))
    return plots


def grouped(records, names, key, value, base=None):
    """{parameter: {peer: value}}, divided by that of the base if there is one."""
    groups = {}
    for record in records:
        groups.setdefault(record['params'][key], {})[record['peer']] = value(record)
    if base:
        groups = {label: {peer: v / group[base] for peer, v in group.items()} for label, group in groups.items() if base in group}
    groups = {label: {peer: v for peer, v in group.items() if peer in names} for label, group in groups.items()}
    return {label: group for label, group in groups.items() if group}


def labelled(groups, form):
    return {form.format(label): group for label, group in sorted(groups.items(), key=lambda item: str(item[0]))}
