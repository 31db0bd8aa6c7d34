//! Shared parts of the binding: the memory of arrays, the running of a call, and the functions that CachedMethod calls.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "endpoint/endpoint.h"
#include "python_lock.h"

namespace unisono {

//! The memory of a contiguous array, or of None, which has none. Keeps the array's buffer exported.
class Buffer {
 public:
  Buffer() = default;
  Buffer(nanobind::handle array, bool writable);
  Buffer(Buffer&& other) noexcept : view_(std::exchange(other.view_, Py_buffer{})) {}
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }
  std::byte* data() const { return static_cast<std::byte*>(view_.buf); }
  std::size_t nbytes() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

//! Returns `data`; throws std::invalid_argument if it has no room for `extent`.
std::byte* checked_memory(const Extent& extent, std::byte* data, std::size_t nbytes);

//! The memory of INPUT or OUTPUT of a call: a sequence of arrays, one for each extent. Throws std::invalid_argument if
//! their number is wrong or one is too short.
class Operands {
 public:
  Operands(const CompiledCall& call, BufferKind kind, nanobind::handle arrays);
  Operands(Operands&&) = default;
  std::span<std::byte* const> addresses() const { return addresses_; }

 private:
  std::vector<Buffer> held_;
  std::vector<std::byte*> addresses_;
};

//! Returns the place of the innermost frame outside of the package. Needs the interpreter's lock.
CallSite call_site();
//! Sets the directory of the package, whose frames are not the user's.
void set_package_directory(std::string directory);

//! Whether a signal handler has raised an exception; for waiting threads. Takes the interpreter's lock.
bool interrupted();
//! Returns the number of an outcome; raises the exception of a signal handler if that has interrupted the call.
int outcome_of(Outcome outcome);

//! For how many looks, and for operands of at most how many bytes, a call keeps the interpreter's lock. That takes some
//! microseconds, and some tens of them for the largest.
inline constexpr std::uint32_t polls_with_lock_held = 200;
inline constexpr std::size_t most_nbytes_with_lock_held = 1 << 20;
//! Messages of at most this size begin in the call that starts them.
inline constexpr std::size_t most_nbytes_begun_at_once = 64 << 10;

//! The objects that own the memory of a call.
struct MemoryOwners {
  nanobind::handle inputs;
  nanobind::handle outputs;
};

//! If ranks share cores, yields a few times before the caller examines a call that has not ended. The reason is that
//! finding its place in the program takes as long as a time slice of another rank. Returns the state afterwards.
Outcome yield_and_poll(Endpoint& endpoint, const Request& request);

//! Runs a call to its end. A small call is tried for a moment with the interpreter's lock held, because releasing and
//! retaking it costs as much as the exchange. `site` is its place in the program if it ends in that moment. If the call
//! fails and a library may still use the memory, its owners are never freed.
int run_call(Endpoint& endpoint, const CompiledCall& call, const Memory& memory, MemoryOwners owners,
             const CallSite& site, double timeout_s);

//! Starts a call with a time limit, in the background. A short call whose peers have come already ends here, without a
//! switch to the thread for background calls. Then there is no request. `site` is its place in the program if it ends
//! here.
std::unique_ptr<Request> start_call(Endpoint& endpoint, const CompiledCall& call, const Memory& memory,
                                    const CallSite& site, double timeout_s);

//! The number of arguments of `CallCache.run`: collective, x, out, op, root, algorithm and timeout_s.
inline constexpr std::size_t cache_arguments = 7;
//! The result of a cached call. `hit`: it has run. `failed`: Python's error is set.
enum class CacheResult : std::uint8_t { miss, hit, failed };
//! Runs a call if `cache` is a CallCache that has it. Any other object is a miss.
CacheResult run_cached(PyObject* cache, PyObject* const* arguments);
//! The same for a message, if `calls` is a MessageCalls. The arguments are the method's name, x, out, dest, source, tag
//! and timeout_s. They are None if the method has no such parameter.
CacheResult run_fast_message(PyObject* calls, PyObject* const* arguments);
//! Whether `cache` is a GroupRecorder. `record_call` records a call there and returns its work, or nullptr with
//! Python's error set.
bool is_group_recorder(PyObject* cache);
PyObject* record_call(PyObject* recorder, PyObject* const* arguments);

//! Returns the result of `call`. If it throws, sets Python's error and returns `failed`. For functions that Python
//! calls without nanobind.
template <class Result, class Function>
Result or_error(Result failed, Function call) {
  try {
    return call();
  } catch (nanobind::python_error& error) {
    error.restore();
  } catch (const nanobind::builtin_exception& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return failed;
}

void bind_call_cache(nanobind::module_& module);
void bind_fast_messages(nanobind::module_& module);
void bind_cached_method(nanobind::module_& module);
void bind_cuda_programs(nanobind::module_& module);
//! Binds the copies between strided regions.
void bind_strided_copies(nanobind::module_& module);
void bind_group_recorder(nanobind::module_& module);
void bind_tls(nanobind::module_& module);
void bind_torch_tensors(nanobind::module_& module);
void bind_windows(nanobind::module_& module);

}  // namespace unisono
