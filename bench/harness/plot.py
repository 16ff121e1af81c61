"""Line and bar charts as SVG, without any library: axes, ticks, a legend, nothing more."""
import math
from html import escape

WIDTH, HEIGHT = 760, 400
LEFT, RIGHT, TOP, BOTTOM = 76, 170, 44, 52
COLORS = ['#1b6ca8', '#d1495b', '#3c8d40', '#e08e1b', '#7b4ea3', '#555555', '#17a2a2']


class Axis:
    """Maps values to pixels, linear from zero or logarithmic, and knows its ticks."""

    def __init__(self, values, begin, end, log):
        self.begin, self.end, self.log = begin, end, log
        top = max(values) or 1
        if log:
            low = min(value for value in values if value > 0)
            self.low, self.high = math.floor(math.log10(low)), math.ceil(math.log10(top) + 1e-9)
            self.high = max(self.high, self.low + 1)
            self.ticks = [10.0 ** power for power in range(self.low, self.high + 1)]
        else:
            step = 10 ** math.floor(math.log10(top))
            step = next(s for s in (step / 5, step / 2, step, step * 2) if top / s <= 6)
            self.low, self.high = 0, step * math.ceil(top / step)
            self.ticks = [step * i for i in range(round(self.high / step) + 1)]

    def at(self, value):
        if self.log:
            value = math.log10(max(value, 10.0 ** self.low))
        return self.begin + (value - self.low) / (self.high - self.low) * (self.end - self.begin)


def number(value):
    for size, suffix in ((1e6, 'M'), (1e3, 'k')):
        if value >= size:
            return f'{value / size:g}{suffix}'
    return f'{value:g}'


def text(x, y, content, anchor='middle', size=12, more=''):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{more}>{escape(str(content))}</text>'


def frame(title, y_label, y_axis):
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" fill="#222">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', text(LEFT, 22, title, 'start', 15)]
    for tick in y_axis.ticks:
        y = y_axis.at(tick)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(text(LEFT - 8, y + 4, number(tick), 'end'))
    middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(text(18, middle, y_label, 'middle', 12, f' transform="rotate(-90 18 {middle:.0f})"'))
    return parts


def legend(parts, names):
    for i, name in enumerate(names):
        y = TOP + 10 + 20 * i
        parts.append(f'<rect x="{WIDTH - RIGHT + 16}" y="{y - 9}" width="12" height="12" fill="{COLORS[i % len(COLORS)]}"/>')
        parts.append(text(WIDTH - RIGHT + 34, y + 2, name, 'start'))


def lines(title, x_label, y_label, series, log_x=False, log_y=False):
    """series: {name: [(x, y), ...]}"""
    points = [point for line in series.values() for point in line]
    x_axis = Axis([x for x, _ in points], LEFT, WIDTH - RIGHT, log_x)
    y_axis = Axis([y for _, y in points], HEIGHT - BOTTOM, TOP, log_y)
    parts = frame(title, y_label, y_axis)
    for tick in x_axis.ticks:
        parts.append(text(x_axis.at(tick), HEIGHT - BOTTOM + 18, number(tick)))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, x_label))
    for i, line in enumerate(series.values()):
        color = COLORS[i % len(COLORS)]
        path = ' '.join(f'{x_axis.at(x):.1f},{y_axis.at(y):.1f}' for x, y in line)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        if len(line) <= 12:
            parts += [f'<circle cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="3" fill="{color}"/>' for x, y in line]
    legend(parts, series)
    return '\n'.join(parts + ['</svg>\n'])


def bars(title, y_label, groups, names, mark=None):
    """groups: {label: {name: value}}; mark: a height at which a dashed line is drawn"""
    values = [value for group in groups.values() for value in group.values()] + ([mark] if mark else [])
    y_axis = Axis(values, HEIGHT - BOTTOM, TOP, False)
    parts = frame(title, y_label, y_axis)
    width = (WIDTH - RIGHT - LEFT) / len(groups)
    bar = width * 0.8 / len(names)
    for g, (label, group) in enumerate(groups.items()):
        left = LEFT + g * width + width * 0.1
        parts.append(text(left + width * 0.4, HEIGHT - BOTTOM + 18, label))
        for i, name in enumerate(names):
            if name in group:
                y = y_axis.at(group[name])
                parts.append(f'<rect x="{left + i * bar:.1f}" y="{y:.1f}" width="{bar * 0.92:.1f}" height="{HEIGHT - BOTTOM - y:.1f}" '
                             f'fill="{COLORS[i % len(COLORS)]}"/>')
    if mark:
        y = y_axis.at(mark)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#222" stroke-dasharray="5 4"/>')
    legend(parts, names)
    return '\n'.join(parts + ['</svg>\n'])
