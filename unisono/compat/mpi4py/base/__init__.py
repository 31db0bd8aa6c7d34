"""What all objects of MPI stand on.

constants: the numbers.
errors: exceptions with MPI's classes of errors.
handles: the base of all objects, with attributes, names and error handlers.
world: initializing and ending the job.
"""
