"""What all objects of MPI stand on.

arguments: integers as arguments of calls.
constants: the numbers.
errors: exceptions with MPI's classes of errors.
handles: the base of all objects, with attributes, names and error handlers.
world: initializing and ending the job.
"""
