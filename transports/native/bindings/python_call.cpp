#include "python_call.h"

#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_set>

namespace nb = nanobind;

namespace unisono {
namespace {

std::string& package_directory() {
  static std::string directory;
  return directory;
}

const char* interned(const char* name) {
  static std::unordered_set<std::string> names;
  return names.emplace(name).first->c_str();
}

// Whether a file is the user's. The package is not, nor is code between the two: contextlib, where a `with` block ends,
// torch, which calls its backend, and JAX, which lowers programs.
bool is_of_user(std::string_view file) {
  return !file.starts_with(package_directory()) && !file.ends_with("/contextlib.py") &&
         file.find("-packages/torch/") == std::string_view::npos &&
         file.find("-packages/jax/") == std::string_view::npos;
}

}  // namespace

Buffer::Buffer(nb::handle array, bool writable) {
  if (array.is_none()) return;
  const int flags = writable ? PyBUF_SIMPLE | PyBUF_WRITABLE : PyBUF_SIMPLE;
  if (PyObject_GetBuffer(array.ptr(), &view_, flags) != 0) throw nb::python_error();
}

std::byte* checked_memory(const Extent& extent, std::byte* data, std::size_t nbytes) {
  if (nbytes < extent.nbytes()) throw std::invalid_argument("an array is shorter than its extent in the call");
  return data;
}

Operands::Operands(const CompiledCall& call, BufferKind kind, nb::handle arrays) {
  const auto& extents = call.program.extents(kind);
  if (nb::len(arrays) != extents.size()) throw std::invalid_argument("there must be one array for each extent");
  for (const Extent& extent : extents) {
    const Buffer& held = held_.emplace_back(arrays[held_.size()], kind == BufferKind::output);
    addresses_.push_back(checked_memory(extent, held.data(), held.nbytes()));
  }
}

CallSite call_site() {
  CallSite site;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  while (frame != nullptr && site.file == nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    if (file != nullptr && is_of_user(file)) site = {interned(file), PyFrame_GetLineNumber(frame)};
    PyErr_Clear();
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return site;
}

void set_package_directory(std::string directory) { package_directory() = std::move(directory); }

bool interrupted() {
  if (interpreter_ends()) return false;
  const LockTaken lock;
  return PyErr_CheckSignals() != 0;
}

int outcome_of(Outcome outcome) {
  if (outcome == Outcome::interrupted) throw nb::python_error();
  return static_cast<int>(outcome);
}

Outcome yield_and_poll(Endpoint& endpoint, const Request& request) {
  if (endpoint.crowded() && request.outcome() == Outcome::pending) {
    const LockReleased unlocked;
    endpoint.yield_and_poll(request);
  }
  return request.outcome();
}

int run_call(Endpoint& endpoint, const CompiledCall& call, const Memory& memory, MemoryOwners owners,
             const CallSite& site, double timeout_s) {
  if (endpoint.abandoned()) return static_cast<int>(Outcome::failed);
  const std::size_t nbytes = std::max(call.program.nbytes(BufferKind::input), call.program.nbytes(BufferKind::output));
  std::unique_ptr<Request> request;
  if (!endpoint.try_now(call, memory, site, nbytes <= most_nbytes_with_lock_held ? polls_with_lock_held : 0, request))
    request = endpoint.start(call, memory, call_site());
  else if (!request)
    return static_cast<int>(Outcome::done);
  else if (yield_and_poll(endpoint, *request) == Outcome::pending)
    endpoint.set_site(*request, call_site());
  Outcome outcome;
  {
    const LockReleased unlocked;
    outcome = endpoint.wait(*request, timeout_s, interrupted);
  }
  if (outcome != Outcome::done && endpoint.memory_must_leak()) {
    owners.inputs.inc_ref();
    owners.outputs.inc_ref();
  }
  return outcome_of(outcome);
}

std::unique_ptr<Request> start_call(Endpoint& endpoint, const CompiledCall& call, const Memory& memory,
                                    const CallSite& site, double timeout_s) {
  std::unique_ptr<Request> request;
  const bool is_short = call.description->nbytes <= most_nbytes_begun_at_once;
  if (!is_short || !endpoint.try_now(call, memory, site, polls_with_lock_held, request))
    request = endpoint.start(call, memory, call_site());
  else if (!request)
    return nullptr;
  else
    endpoint.set_site(*request, call_site());
  endpoint.run_in_background(*request, timeout_s);
  return request;
}

}  // namespace unisono
