"""The integer constants of MPI, as tables; `MPI` has each of them as an attribute."""

from __future__ import annotations

VERSION, SUBVERSION = 4, 0

# Classes of errors, in the order of MPI's standard, with the texts of `Get_error_string`.
_ERRORS = """
SUCCESS no error
ERR_BUFFER invalid buffer pointer
ERR_COUNT invalid count
ERR_TYPE invalid datatype
ERR_TAG invalid tag
ERR_COMM invalid communicator
ERR_RANK invalid rank
ERR_REQUEST invalid request
ERR_ROOT invalid root
ERR_GROUP invalid group
ERR_OP invalid reduction operation
ERR_TOPOLOGY invalid topology
ERR_DIMS invalid number of dimensions
ERR_ARG invalid argument
ERR_UNKNOWN unknown error
ERR_TRUNCATE message is truncated or differs from what the receiver expects
ERR_OTHER known error not in this list
ERR_INTERN internal error
ERR_IN_STATUS error code is in status
ERR_PENDING pending request
ERR_ACCESS permission denied
ERR_AMODE invalid access mode
ERR_ASSERT invalid assertion
ERR_BAD_FILE invalid file name
ERR_BASE invalid base of a window
ERR_CONVERSION error in a data conversion
ERR_DISP invalid displacement
ERR_DUP_DATAREP data representation is already defined
ERR_FILE_EXISTS file exists
ERR_FILE_IN_USE file is in use
ERR_FILE invalid file handle
ERR_INFO_KEY invalid key of an info object
ERR_INFO_NOKEY info object has no such key
ERR_INFO_VALUE invalid value of an info object
ERR_INFO invalid info object
ERR_IO input or output error
ERR_KEYVAL invalid keyval
ERR_LOCKTYPE invalid lock type
ERR_NAME no such service name
ERR_NO_MEM no memory
ERR_NOT_SAME collective argument is not the same on all processes
ERR_NO_SPACE no space left
ERR_NO_SUCH_FILE no such file
ERR_PORT invalid port
ERR_QUOTA quota exceeded
ERR_READ_ONLY read-only file or file system
ERR_RMA_CONFLICT conflicting accesses to a window
ERR_RMA_SYNC wrong synchronization of a window
ERR_SERVICE invalid publish or unpublish
ERR_SIZE invalid size
ERR_SPAWN error in spawning processes
ERR_UNSUPPORTED_DATAREP unsupported data representation
ERR_UNSUPPORTED_OPERATION unsupported operation
ERR_WIN invalid window
ERR_RMA_RANGE target memory is not part of the window
ERR_RMA_ATTACH memory cannot be attached
ERR_RMA_FLAVOR window has the wrong flavor
ERR_RMA_SHARED memory cannot be shared
ERR_SESSION invalid session
ERR_ERRHANDLER invalid error handler
ERR_PROC_ABORTED a process of the job has aborted
ERR_VALUE_TOO_LARGE value is too large
ERR_ABI abi mismatch
ERR_REVOKED communicator has been revoked
ERR_PROC_FAILED a process has failed
ERR_PROC_FAILED_PENDING a process has failed and the request is pending
"""
ERROR_TEXTS = [line.partition(" ")[2] for line in _ERRORS.split("\n") if line]
ERRORS = {line.split(" ")[0]: code for code, line in enumerate(line for line in _ERRORS.split("\n") if line)}

# Constants that the program combines by "or", and constants that only have to differ.
_FLAGS = {
    "MODE_NOCHECK MODE_NOSTORE MODE_NOPUT MODE_NOPRECEDE MODE_NOSUCCEED": 0,
    "MODE_RDONLY MODE_RDWR MODE_WRONLY MODE_CREATE MODE_EXCL MODE_DELETE_ON_CLOSE MODE_UNIQUE_OPEN MODE_APPEND "
    "MODE_SEQUENTIAL": 1,
}
_COUNTED = {
    "IDENT CONGRUENT SIMILAR UNEQUAL": 0,
    "CART GRAPH DIST_GRAPH": 1,
    "ORDER_C ORDER_FORTRAN": 56,
    "DISTRIBUTE_BLOCK DISTRIBUTE_CYCLIC DISTRIBUTE_NONE": 121,
    "TYPECLASS_REAL TYPECLASS_INTEGER TYPECLASS_COMPLEX TYPECLASS_LOGICAL": 1,
    "COMBINER_NAMED COMBINER_DUP COMBINER_CONTIGUOUS COMBINER_VECTOR COMBINER_HVECTOR COMBINER_INDEXED "
    "COMBINER_HINDEXED COMBINER_INDEXED_BLOCK COMBINER_HINDEXED_BLOCK COMBINER_STRUCT COMBINER_SUBARRAY "
    "COMBINER_DARRAY COMBINER_RESIZED COMBINER_VALUE_INDEX COMBINER_F90_INTEGER COMBINER_F90_REAL "
    "COMBINER_F90_COMPLEX": 1,
    "COMM_TYPE_SHARED COMM_TYPE_HW_GUIDED COMM_TYPE_HW_UNGUIDED COMM_TYPE_RESOURCE_GUIDED": 1,
    "WIN_FLAVOR_CREATE WIN_FLAVOR_ALLOCATE WIN_FLAVOR_DYNAMIC WIN_FLAVOR_SHARED": 1,
    "WIN_SEPARATE WIN_UNIFIED": 1,
    "LOCK_EXCLUSIVE LOCK_SHARED": 234,
    "SEEK_SET SEEK_CUR SEEK_END": 0,
    "THREAD_SINGLE THREAD_FUNNELED THREAD_SERIALIZED THREAD_MULTIPLE": 0,
    "TAG_UB IO WTIME_IS_GLOBAL UNIVERSE_SIZE APPNUM LASTUSEDCODE": 1,
    "WIN_BASE WIN_SIZE WIN_DISP_UNIT WIN_CREATE_FLAVOR WIN_MODEL": 11,
    "F_SOURCE F_TAG F_ERROR": 0,
    "UNWEIGHTED WEIGHTS_EMPTY": 10,
}
_FIXED = {
    "UNDEFINED": -32766,
    "ANY_SOURCE": -1,
    "ANY_TAG": -1,
    "PROC_NULL": -2,
    "ROOT": -4,
    "KEYVAL_INVALID": -1,
    "ERR_LASTCODE": 92,
    "DISTRIBUTE_DFLT_DARG": -49767,
    "F_STATUS_SIZE": 6,
    "BSEND_OVERHEAD": 128,
    "DISPLACEMENT_CURRENT": -54278278,
    "DISP_CUR": -54278278,
    "VERSION": VERSION,
    "SUBVERSION": SUBVERSION,
    "MAX_PROCESSOR_NAME": 255,
    "MAX_ERROR_STRING": 4096,
    "MAX_PORT_NAME": 1023,
    "MAX_INFO_KEY": 255,
    "MAX_INFO_VAL": 1023,
    "MAX_OBJECT_NAME": 127,
    "MAX_DATAREP_STRING": 127,
    "MAX_LIBRARY_VERSION_STRING": 255,
    "MAX_PSET_NAME_LEN": 511,
    "MAX_STRINGTAG_LEN": 255,
}

CONSTANTS: dict[str, int] = {
    **ERRORS,
    **{name: 1 << (first + n) for names, first in _FLAGS.items() for n, name in enumerate(names.split())},
    **{name: first + n for names, first in _COUNTED.items() for n, name in enumerate(names.split())},
    **_FIXED,
}
CONSTANTS["ORDER_F"] = CONSTANTS["ORDER_FORTRAN"]
CONSTANTS["WIN_FLAVOR"] = CONSTANTS["WIN_CREATE_FLAVOR"]

UNDEFINED, ANY_SOURCE, ANY_TAG = CONSTANTS["UNDEFINED"], CONSTANTS["ANY_SOURCE"], CONSTANTS["ANY_TAG"]
PROC_NULL, ROOT, KEYVAL_INVALID = CONSTANTS["PROC_NULL"], CONSTANTS["ROOT"], CONSTANTS["KEYVAL_INVALID"]
IDENT, CONGRUENT, SIMILAR, UNEQUAL = (CONSTANTS[name] for name in ("IDENT", "CONGRUENT", "SIMILAR", "UNEQUAL"))
# The largest tag of a message.
MOST_TAG = (1 << 31) - 1
