// An MPI library for XLA, whose functions are calls of Unisono.
//
// XLA's collectives on CPUs, such as psum over the processes of a JAX program, can use MPI. They reach it through
// MPItrampoline, which loads the library that the environment variable MPITRAMPOLINE_LIB names and looks up each
// function and constant of MPI there, as MPIABI_<name> (https://github.com/eschnett/MPItrampoline, ABI version 2.9).
// This file is such a library. It has the fifteen functions that XLA calls; any other ends the program.
//
// Each function packs its arguments into integers and passes them to `handler`, a function of frameworks/jax/xla.py.
// XLA calls from threads of its own, without Python's lock; `handler` takes the lock.
//
// Collectives take the lock only the first time. Then the handler plans the call and registers it with the native core
// under a number. This call and all equal ones are run by the function `runner` of the core, without Python:
//
//     XLA: psum(x)  →  MPI_Allreduce (MPItrampoline)  →  MPIABI_Allreduce (here)  →  runner(number, x, result)
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#define EXPORTED __attribute__((visibility("default")))
#define CONSTANT(type, name, value) EXPORTED extern const type name = value

namespace {

using Handle = std::uintptr_t;

// The functions by which xla.py tells calls apart; `Function` there has the same order.
enum class Function : std::int64_t {
  split,
  free,
  rank,
  size,
  allreduce,
  allgather,
  reduce_scatter,
  send,
  receive,
  wait,
  exchange,
  finalize
};

using Handler = std::int64_t (*)(std::int64_t function, std::int64_t, std::int64_t, std::int64_t, std::int64_t,
                                 std::int64_t, std::int64_t);
Handler handler = nullptr;

// Runs a registered call, and returns whether it has succeeded; otherwise `text` gets the error.
using Runner = bool (*)(std::int64_t number, void* input, void* output, char* text, std::size_t text_nbytes);
Runner runner = nullptr;

// Set by any thread of XLA whose call has failed. Python reads it before the process ends.
std::atomic<bool> has_failed = false;

// The error of the last call of this thread that failed. XLA asks for it in the same thread.
thread_local std::string last_error;
constexpr std::size_t most_error_nbytes = 1023;  // MPI_MAX_ERROR_STRING without the final zero

std::int64_t address(const void* memory) { return static_cast<std::int64_t>(reinterpret_cast<Handle>(memory)); }

template <typename... Arguments>
std::int64_t call(Function function, Arguments... arguments) {
  static_assert(sizeof...(arguments) <= 6);
  if (handler == nullptr) return 0;
  std::int64_t values[6]{static_cast<std::int64_t>(arguments)...};
  return handler(static_cast<std::int64_t>(function), values[0], values[1], values[2], values[3], values[4], values[5]);
}

// The result of a function of MPI whose call has returned `result`.
int status(std::int64_t result) {
  if (result != 0) return 0;
  has_failed = true;
  return 1;
}

// A collective as its handler gets it: the function, the communicator, and further arguments.
using Key = std::array<std::int64_t, 5>;
std::map<Key, std::int64_t> numbers;
std::shared_mutex numbers_mutex;  // guards `numbers`, and is not held while Python plans a call

// The number of a call that is not made, as in xla.py.
constexpr std::int64_t left_out = -1;

// The number of a registered call, which is 0 if it cannot be made, or `left_out`.
std::int64_t number_of(const Key& key) {
  {
    const std::shared_lock lock(numbers_mutex);
    const auto place = numbers.find(key);
    if (place != numbers.end()) return place->second;
  }
  const std::int64_t number = call(static_cast<Function>(key[0]), key[1], key[2], key[3], key[4]);
  const std::unique_lock lock(numbers_mutex);
  if (number > 0) numbers.emplace(key, number);
  return number;
}

// Makes a collective on buffers of XLA. `nbytes` is the length of the input, if it may be the output, too.
int run(const Key& key, const void* send, void* receive, std::size_t nbytes = 0) {
  const std::int64_t number = number_of(key);
  if (number == 0) return status(0);
  if (number == left_out) return 0;
  std::vector<char> copy;  // not every algorithm can run in place
  if (send == receive && nbytes != 0)
    copy.assign(static_cast<const char*>(send), static_cast<const char*>(send) + nbytes);
  void* input = copy.empty() ? const_cast<void*>(send) : copy.data();
  std::array<char, most_error_nbytes + 1> text;
  if (runner(number, input, receive, text.data(), text.size())) return 0;
  last_error = text.data();
  return status(0);
}

// The bytes of an element, by the number of its type, see below.
constexpr std::array<std::size_t, 14> itemsizes{0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 4, 8, 8, 16};

std::int64_t number(Function function) { return static_cast<std::int64_t>(function); }

std::int64_t number(Handle handle) { return static_cast<std::int64_t>(handle); }

[[noreturn]] void refuse() {
  std::fputs("unisono: XLA called a function of MPI that Unisono does not have\n", stderr);
  std::abort();
}

}  // namespace

// Sets the function that plans and makes calls.
extern "C" EXPORTED void unisono_set_handler(Handler function) { handler = function; }

// Sets the function of the native core that runs registered calls.
extern "C" EXPORTED void unisono_set_runner(Runner function) { runner = function; }

// Whether a call has failed.
extern "C" EXPORTED int unisono_has_failed() { return has_failed ? 1 : 0; }

// Sets the error of this thread's call.
extern "C" EXPORTED void unisono_set_error(const char* text) { last_error = text; }

extern "C" {
// The version of the ABI, and that of this library.
CONSTANT(int, mpiabi_version_major, 2);
CONSTANT(int, mpiabi_version_minor, 9);
CONSTANT(int, mpiabi_version_patch, 0);
CONSTANT(int, mpiwrapper_version_major, 2);
CONSTANT(int, mpiwrapper_version_minor, 9);
CONSTANT(int, mpiwrapper_version_patch, 0);
EXPORTED void mpiwrapper_export_fortran_constants_() {}
EXPORTED int MPIXABI_Query_cuda_support() { return 0; }
EXPORTED int MPIXABI_Query_hip_support() { return 0; }
EXPORTED int MPIXABI_Query_ze_support() { return 0; }

CONSTANT(int, MPIABI_SUCCESS, 0);
CONSTANT(int, MPIABI_UNDEFINED, -1);
CONSTANT(int, MPIABI_THREAD_FUNNELED, 1);
CONSTANT(Handle, MPIABI_COMM_NULL, 0);
CONSTANT(Handle, MPIABI_COMM_WORLD, 1);
CONSTANT(Handle, MPIABI_REQUEST_NULL, 0);
CONSTANT(Handle, MPIABI_STATUS_IGNORE, 0);
CONSTANT(Handle, MPIABI_STATUSES_IGNORE, 0);
// Numbered from 1 in the order of DTYPES and OPS of xla.py.
CONSTANT(Handle, MPIABI_BYTE, 1);
CONSTANT(Handle, MPIABI_INT8_T, 2);
CONSTANT(Handle, MPIABI_INT16_T, 3);
CONSTANT(Handle, MPIABI_INT32_T, 4);
CONSTANT(Handle, MPIABI_INT64_T, 5);
CONSTANT(Handle, MPIABI_UINT8_T, 6);
CONSTANT(Handle, MPIABI_UINT16_T, 7);
CONSTANT(Handle, MPIABI_UINT32_T, 8);
CONSTANT(Handle, MPIABI_UINT64_T, 9);
CONSTANT(Handle, MPIABI_FLOAT, 10);
CONSTANT(Handle, MPIABI_DOUBLE, 11);
CONSTANT(Handle, MPIABI_C_COMPLEX, 12);
CONSTANT(Handle, MPIABI_C_DOUBLE_COMPLEX, 13);
CONSTANT(Handle, MPIABI_SUM, 1);
CONSTANT(Handle, MPIABI_PROD, 2);
CONSTANT(Handle, MPIABI_MIN, 3);
CONSTANT(Handle, MPIABI_MAX, 4);

// --- functions; each returns 0 for success, or 1 for an error of this thread ----------------------------------------

EXPORTED int MPIABI_Init_thread(int*, char***, int, int* provided) {
  *provided = 3;  // MPI_THREAD_MULTIPLE
  return 0;
}

EXPORTED int MPIABI_Finalize() { return status(call(Function::finalize)); }

// XLA makes communicators only in the thread that has initialised MPI. Unisono needs no such limit.
EXPORTED int MPIABI_Is_thread_main(int* is_main) {
  *is_main = 1;
  return 0;
}

EXPORTED int MPIABI_Comm_rank(Handle communicator, int* rank) {
  *rank = static_cast<int>(call(Function::rank, communicator));
  return 0;
}

EXPORTED int MPIABI_Comm_size(Handle communicator, int* size) {
  *size = static_cast<int>(call(Function::size, communicator));
  return 0;
}

// XLA ignores the error of this function. So it always returns a communicator, whose calls fail if there was an error.
EXPORTED int MPIABI_Comm_split(Handle communicator, int color, int key, Handle* split) {
  *split = static_cast<Handle>(call(Function::split, communicator, color, key));
  return 0;
}

EXPORTED int MPIABI_Comm_free(Handle* communicator) {
  call(Function::free, *communicator);
  *communicator = MPIABI_COMM_NULL;
  return 0;
}

EXPORTED int MPIABI_Allreduce(const void* send, void* receive, int count, Handle dtype, Handle op,
                              Handle communicator) {
  const std::size_t nbytes = static_cast<std::size_t>(count) * itemsizes.at(dtype);
  return run({number(Function::allreduce), number(communicator), count, number(dtype), number(op)}, send, receive,
             nbytes);
}

EXPORTED int MPIABI_Allgather(const void* send, int count, Handle dtype, void* receive, int, Handle,
                              Handle communicator) {
  return run({number(Function::allgather), number(communicator), count, number(dtype), 0}, send, receive);
}

// XLA scatters equal parts.
EXPORTED int MPIABI_Reduce_scatter(const void* send, void* receive, const int* counts, Handle dtype, Handle op,
                                   Handle communicator) {
  return run({number(Function::reduce_scatter), number(communicator), counts[0], number(dtype), number(op)}, send,
             receive);
}

EXPORTED int MPIABI_Isend(const void* data, int count, Handle dtype, int dest, int tag, Handle communicator,
                          Handle* request) {
  *request = static_cast<Handle>(call(Function::send, communicator, address(data), count, dtype, dest, tag));
  return status(static_cast<std::int64_t>(*request));
}

EXPORTED int MPIABI_Irecv(void* data, int count, Handle dtype, int source, int tag, Handle communicator,
                          Handle* request) {
  *request = static_cast<Handle>(call(Function::receive, communicator, address(data), count, dtype, source, tag));
  return status(static_cast<std::int64_t>(*request));
}

EXPORTED int MPIABI_Wait(Handle* request, void*) {
  return status(call(Function::wait, std::exchange(*request, MPIABI_REQUEST_NULL)));
}

// XLA exchanges parts of equal length.
EXPORTED int MPIABI_Sendrecv(const void* send, int count, Handle, int dest, int, void* receive, int, Handle, int source,
                             int, Handle communicator, void*) {
  return run({number(Function::exchange), number(communicator), count, dest, source}, send, receive);
}

EXPORTED int MPIABI_Error_string(int, char* text, int* length) {
  const std::size_t nbytes = std::min(last_error.size(), most_error_nbytes);
  last_error.copy(text, nbytes);
  text[nbytes] = 0;
  *length = static_cast<int>(nbytes);
  return 0;
}

// MPItrampoline, by which XLA loads this library, looks up all names of mpi_names.inc and refuses a library that lacks
// one. XLA uses none of them, so the functions refuse, and the constants are 0.
#define FUNCTION(name) \
  EXPORTED void MPIABI_##name() { refuse(); }
#define UNUSED(name) CONSTANT(std::uint64_t, MPIABI_##name, 0);
#include "mpi_names.inc"
}
