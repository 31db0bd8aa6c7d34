"""Chooses algorithms: measures machines, predicts times, and keeps decision tables.

- `decide/`: the choice of an algorithm for a call.
- `machine/`: machines, networks, and the costs of their links.
- `measure/`: measurements, calibrations and campaigns.
- `exports/`: decision tables in the formats of other libraries.
- `simulator/`: predicted times of plans on described topologies.
"""
