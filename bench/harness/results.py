"""What was measured: records, each a list of values by round, and what could not be measured, with the reason."""
import math
import statistics


def percentile(values, share):
    """The value below which that share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)]


class Spread:
    """Median, minimum and maximum of the rounds."""

    def __init__(self, values):
        self.values = list(values)
        self.median = statistics.median(self.values)
        self.min = min(self.values)
        self.max = max(self.values)

    def as_dict(self):
        return {'median': self.median, 'min': self.min, 'max': self.max}


class Results:
    def __init__(self):
        self.records = []
        self.skipped = []
        self.broken = []

    def add(self, scenario, measure, peer, unit, values, series=None, **params):
        record = {'scenario': scenario, 'measure': measure, 'peer': peer, 'params': params, 'unit': unit,
                  'values': list(values), **Spread(values).as_dict()}
        if series:
            record['series'] = series
        self.records.append(record)

    def skip(self, scenario, peer, reason):
        self.skipped.append({'scenario': scenario, 'peer': peer, 'reason': reason})

    def fail(self, scenario, peer, error, **params):
        self.broken.append({'scenario': scenario, 'peer': peer, 'params': params, 'error': error})

    def find(self, scenario, measure, peer=None, **params):
        """All records with these parameters; others of their parameters do not matter."""
        return [record for record in self.records
                if record['scenario'] == scenario and record['measure'] == measure
                and (peer is None or record['peer'] == peer)
                and all(record['params'].get(name) == value for name, value in params.items())]

    def spread(self, scenario, measure, peer, **params):
        found = self.find(scenario, measure, peer, **params)
        return Spread(found[0]['values']) if found else None

    def ratio(self, above, below):
        """The ratio of two records, round by round: both were measured in turn."""
        if above is None or below is None or not all(below.values):
            return None
        return Spread(a / b for a, b in zip(above.values, below.values))
