"""Reductions by Python functions, ``Op.from_function(fn)``.

- `reducer.py`: carries out a reduction: an exchange, the combination in Python, and a second exchange.
- `exchanges.py`: the exchanges by which a reduction can be carried out.
- `functions.py`: calls the function, and checks its result.
"""
