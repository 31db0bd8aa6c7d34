// What the parts of the binding share: arrays' memory, compiled calls with their element types, and the running of one.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <span>
#include <utility>
#include <vector>

#include "endpoint.h"

namespace unisono {

// A contiguous array's memory, or nothing for None.
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

// Memory that has room for `extent`; throws std::invalid_argument if it has not.
std::byte* checked_memory(const Extent& extent, std::byte* data, std::size_t nbytes);

// The memory of INPUT or OUTPUT of a call: a sequence of arrays, one for each extent. Throws std::invalid_argument if
// there are not as many, or one is too short.
class Operands {
 public:
  Operands(const CompiledCall& call, BufferKind kind, nanobind::handle arrays);
  Operands(Operands&&) = default;
  std::span<std::byte* const> addresses() const { return addresses_; }

 private:
  std::vector<Buffer> held_;
  std::vector<std::byte*> addresses_;
};

// Where the user's program called: the innermost frame that is not in the package. Needs the interpreter's lock.
CallSite call_site();
// The directory of the package, whose frames are not the user's.
void set_package_directory(std::string directory);

// Whether a signal's handler has raised; for waiting threads.
bool interrupted();
// The outcome as a number; raises what a signal's handler has raised.
int outcome_of(Outcome outcome);

// Rounds, and the bytes of the largest operand, for which a call keeps the interpreter's lock: some microseconds, and
// for the largest some tens of them.
inline constexpr std::uint32_t held_rounds = 200;
inline constexpr std::size_t most_held_nbytes = 1 << 20;
// The bytes of the largest message that is begun in the call that starts it.
inline constexpr std::size_t most_begun_nbytes = 64 << 10;

// What holds the memory of a call.
struct Owners {
  nanobind::handle inputs;
  nanobind::handle outputs;
};

// Where ranks share cores, lets others have this one a few times, before a call that has not ended is looked at more
// closely: where in the program it stands takes as long to find out as a turn of theirs. Returns how it stands then.
Outcome give_turns(Endpoint& endpoint, const Request& request);

// Runs a call to its end. The owners of its memory stay for ever if it fails and a library may still use that. A small
// one is tried for a moment with the interpreter's lock held, for letting go of it and taking it again costs as much as
// the exchange; `site` stands for its place in the program if it ends in that moment.
int run_call(Endpoint& endpoint, const CompiledCall& call, const Memory& memory, Owners owners, const CallSite& site,
             double timeout_s);

// What `CallCache.run` takes: collective, x, out, op, root, algorithm and timeout_s.
inline constexpr std::size_t known_call_arguments = 7;
// Whether a call was known, and has been run; or has failed, and Python's error is set.
enum class Known : std::uint8_t { no, yes, failed };
// Asks `cache`, which may be an object of any type: one that is no CallCache knows nothing.
Known run_known(PyObject* cache, PyObject* const* arguments);
// The same for messages and what knows of them, by the arguments: the method's name, x, out, dest, source, tag and
// timeout_s, of which those that the method does not have are None.
Known run_message(PyObject* calls, PyObject* const* arguments);
// Whether `cache` is a group's notes, and the work of a call with such arguments that is taken note of there; nullptr,
// with Python's error set, if it cannot be.
bool takes_notes(PyObject* cache);
PyObject* note(PyObject* notes, PyObject* const* arguments);

// What `call` returns, or `failed`, with Python's error set, if it throws: for what Python calls without nanobind.
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
void bind_message_calls(nanobind::module_& module);
void bind_known_first(nanobind::module_& module);
void bind_call_notes(nanobind::module_& module);

}  // namespace unisono
