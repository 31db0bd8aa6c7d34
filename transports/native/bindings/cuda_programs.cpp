// Programs of driver calls for Python, which builds them once and issues them without the interpreter's lock.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include "cuda/cuda_program.h"
#include "python_call.h"

namespace nb = nanobind;

namespace unisono {
namespace {

void* handle_of(std::uintptr_t number) { return reinterpret_cast<void*>(number); }

// A CudaProgram for Python. It also keeps the memory of the counters that its calls use.
class PythonCudaProgram {
 public:
  explicit PythonCudaProgram(std::shared_ptr<const CudaIssuer> issuer) : program_(std::move(issuer)) {}
  PythonCudaProgram(const PythonCudaProgram&) = delete;
  PythonCudaProgram& operator=(const PythonCudaProgram&) = delete;

  void copy(std::uintptr_t dst, std::uintptr_t src, std::size_t nbytes, std::uintptr_t stream) {
    program_.copy(dst, src, nbytes, handle_of(stream));
  }

  void launch(std::uintptr_t function, unsigned blocks, unsigned threads, const std::vector<nb::bytes>& parameters,
              std::uintptr_t stream) {
    std::vector<CudaProgram::Bytes> bytes;
    for (const nb::bytes& parameter : parameters)
      bytes.emplace_back(static_cast<const std::byte*>(parameter.data()), parameter.size());
    program_.launch(handle_of(function), blocks, threads, handle_of(stream), bytes);
  }

  void record(std::uintptr_t event, std::uintptr_t stream) { program_.record(handle_of(event), handle_of(stream)); }

  void wait(std::uintptr_t stream, std::uintptr_t event) { program_.wait(handle_of(stream), handle_of(event)); }

  void raise_flag(std::uintptr_t address, nb::handle counters, std::size_t index, std::uintptr_t stream) {
    program_.raise_flag(address, counter(counters, index), handle_of(stream));
  }

  void await_flag(std::uintptr_t address, nb::handle counters, std::size_t index, std::uintptr_t stream) {
    program_.await_flag(address, counter(counters, index), handle_of(stream));
  }

  // None, or the name of the call that failed and its result.
  nb::object issue() const {
    std::optional<CudaFailure> failure;
    {
      const LockReleased released;
      failure = program_.issue();
    }
    if (!failure) return nb::none();
    return nb::make_tuple(failure->call, failure->result);
  }

 private:
  std::uint64_t& counter(nb::handle counters, std::size_t index) {
    Buffer memory(counters, true);
    const std::span numbers(reinterpret_cast<std::uint64_t*>(memory.data()), memory.nbytes() / sizeof(std::uint64_t));
    if (index >= numbers.size()) throw std::invalid_argument("there is no such counter");
    held_.push_back(std::move(memory));
    return numbers[index];
  }

  CudaProgram program_;
  std::vector<Buffer> held_;
};

}  // namespace

void bind_cuda_programs(nb::module_& module) {
  nb::class_<CudaIssuer>(module, "CudaIssuer")
      .def(
          "__init__", [](CudaIssuer* place, std::uintptr_t context) { new (place) CudaIssuer(handle_of(context)); },
          nb::arg("context"))
      .def("abort", &CudaIssuer::abort);
  nb::class_<PythonCudaProgram>(module, "CudaProgram")
      .def(nb::init<std::shared_ptr<const CudaIssuer>>(), nb::arg("issuer"))
      .def("copy", &PythonCudaProgram::copy, nb::arg("dst"), nb::arg("src"), nb::arg("nbytes"), nb::arg("stream"))
      .def("launch", &PythonCudaProgram::launch, nb::arg("function"), nb::arg("blocks"), nb::arg("threads"),
           nb::arg("parameters"), nb::arg("stream"))
      .def("record", &PythonCudaProgram::record, nb::arg("event"), nb::arg("stream"))
      .def("wait", &PythonCudaProgram::wait, nb::arg("stream"), nb::arg("event"))
      .def("raise_flag", &PythonCudaProgram::raise_flag, nb::arg("address"), nb::arg("counters"), nb::arg("index"),
           nb::arg("stream"))
      .def("await_flag", &PythonCudaProgram::await_flag, nb::arg("address"), nb::arg("counters"), nb::arg("index"),
           nb::arg("stream"))
      .def("issue", &PythonCudaProgram::issue);
}

}  // namespace unisono
