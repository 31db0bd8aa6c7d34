#include "cuda/cuda_program.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "cuda/cuda_library.h"

namespace unisono {
namespace {

constexpr std::size_t most_parameter_nbytes = 4096;  // of a kernel, as the driver limits it

template <class Function>
void find_or_throw(const CudaLibrary& driver, Function& function, const char* name) {
  if (!driver.find(function, name)) throw std::runtime_error(std::string("the driver of the GPU has no ") + name);
}

void require_flag(std::uintptr_t address) {
  if (address % sizeof(std::uint64_t) != 0) throw std::invalid_argument("a flag is not aligned");
}

}  // namespace

CudaIssuer::CudaIssuer(void* context) : context_(context) {
  const CudaLibrary driver;
  find_or_throw(driver, functions_.push_context, "cuCtxPushCurrent");
  find_or_throw(driver, functions_.pop_context, "cuCtxPopCurrent");
  find_or_throw(driver, functions_.copy, "cuMemcpyAsync");
  find_or_throw(driver, functions_.launch, "cuLaunchKernel");
  find_or_throw(driver, functions_.record, "cuEventRecord");
  find_or_throw(driver, functions_.wait, "cuStreamWaitEvent");
  find_or_throw(driver, functions_.write, "cuStreamWriteValue64");
  find_or_throw(driver, functions_.wait_value, "cuStreamWaitValue64");
}

void CudaProgram::copy(std::uintptr_t dst, std::uintptr_t src, std::size_t nbytes, void* stream) {
  if (nbytes == 0) throw std::invalid_argument("a copy has no bytes");
  calls_.emplace_back(Copy{dst, src, nbytes, stream});
}

void CudaProgram::launch(void* function, unsigned blocks, unsigned threads, void* stream,
                         std::span<const Bytes> parameters) {
  if (blocks == 0 || threads == 0) throw std::invalid_argument("a grid has no threads");
  constexpr std::size_t unit = sizeof(std::max_align_t);
  std::vector<std::size_t> places;  // of the parameters, in units
  std::size_t units = 0, nbytes = 0;
  for (const Bytes& parameter : parameters) {
    if (parameter.empty() || parameter.size() > most_parameter_nbytes - nbytes)
      throw std::invalid_argument("the parameters of a kernel are empty or too large");
    nbytes += parameter.size();
    places.push_back(units);
    units += (parameter.size() + unit - 1) / unit;
  }
  Launch made{function, blocks, threads, stream, std::vector<std::max_align_t>(units), {}};
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    void* place = made.memory.data() + places[i];
    std::memcpy(place, parameters[i].data(), parameters[i].size());
    made.parameters.push_back(place);
  }
  calls_.emplace_back(std::move(made));
}

void CudaProgram::record(void* event, void* stream) { calls_.emplace_back(Record{event, stream}); }

void CudaProgram::wait(void* stream, void* event) { calls_.emplace_back(Wait{stream, event}); }

void CudaProgram::raise_flag(std::uintptr_t address, std::uint64_t& counter, void* stream) {
  require_flag(address);
  calls_.emplace_back(RaiseFlag{address, &counter, stream});
}

void CudaProgram::await_flag(std::uintptr_t address, std::uint64_t& counter, void* stream) {
  require_flag(address);
  calls_.emplace_back(AwaitFlag{address, &counter, stream});
}

std::optional<CudaFailure> CudaProgram::issue() const {
  const CudaFunctions& driver = issuer_->functions_;
  if (const int result = driver.push_context(issuer_->context_); result != cuda_success)
    return CudaFailure{"cuCtxPushCurrent", result};
  const std::optional<CudaFailure> failure = issue_calls();
  void* popped = nullptr;
  driver.pop_context(&popped);
  return failure;
}

std::optional<CudaFailure> CudaProgram::issue_calls() const {
  const auto issue_one = [this](const auto& call) -> std::optional<CudaFailure> {
    if (const int result = call.issue(issuer_->functions_); result != cuda_success)
      return CudaFailure{call.name, result};
    return std::nullopt;
  };
  for (const Call& call : calls_) {
    if (issuer_->is_aborted_) return CudaFailure{"", cuda_success};
    if (const auto failure = std::visit(issue_one, call)) return failure;
  }
  return std::nullopt;
}

}  // namespace unisono
