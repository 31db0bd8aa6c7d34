// Programs of driver calls, on the double of the driver (fake_libcuda.cpp).
#include "cuda/cuda_program.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cuda/cuda_library.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

// Sets a variable of the double until the end of the block.
class Setting {
 public:
  Setting(const char* name, const std::string& value) : name_(name) { ::setenv(name, value.c_str(), 1); }
  ~Setting() { ::unsetenv(name_); }
  Setting(const Setting&) = delete;
  Setting& operator=(const Setting&) = delete;

 private:
  const char* name_;
};

template <class... Arguments>
void call(const char* name, Arguments... arguments) {
  int (*function)(Arguments...) = nullptr;
  CHECK(CudaLibrary().find(function, name));
  CHECK(function(arguments...) == cuda_success);
}

template <class T>
std::uintptr_t address(T* pointer) {
  return reinterpret_cast<std::uintptr_t>(pointer);
}

// A device with a stream, two arrays of 64 bytes, and a page of flags.
struct Device {
  static constexpr std::size_t nbytes = 64;
  void* context = nullptr;
  void* stream = nullptr;
  void* event = nullptr;
  char* first = nullptr;
  char* second = nullptr;
  std::uint64_t* flags = nullptr;
  std::array<std::uint64_t, 2> counters{};
  std::shared_ptr<CudaIssuer> issuer;

  Device() {
    CHECK(::dlopen(DRIVER, RTLD_NOW) != nullptr);
    call("cuInit", 0u);
    call("cuDevicePrimaryCtxRetain", &context, 0);
    call("cuCtxPushCurrent", context);
    call("cuStreamCreate", &stream, 1u);
    call("cuEventCreate", &event, 2u);
    for (char** array : {&first, &second}) call("cuMemAlloc", reinterpret_cast<void**>(array), nbytes);
    void* page = ::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(page != MAP_FAILED);
    call("cuMemHostRegister", page, std::size_t{4096}, 2u);
    flags = static_cast<std::uint64_t*>(page);
    issuer = std::make_shared<CudaIssuer>(context);
    void* popped = nullptr;
    call("cuCtxPopCurrent", &popped);
  }

  ~Device() {
    void* popped = nullptr;
    call("cuCtxPushCurrent", context);
    call("cuStreamSynchronize", stream);
    call("cuMemHostUnregister", static_cast<void*>(flags));
    for (char* array : {first, second}) call("cuMemFree", address(array));
    call("cuStreamDestroy", stream);
    call("cuEventDestroy", event);
    call("cuCtxPopCurrent", &popped);
    ::munmap(flags, 4096);
  }

  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  void copy_to(CudaProgram& program) { program.copy(address(second), address(first), nbytes, stream); }
};

void test_program_makes_its_calls_in_order_each_time() {
  Device device;
  CudaProgram program(device.issuer);
  program.wait(device.stream, device.event);
  device.copy_to(program);
  program.raise_flag(address(&device.flags[1]), device.counters[0], device.stream);
  program.await_flag(address(&device.flags[1]), device.counters[1], device.stream);
  program.record(device.event, device.stream);
  for (std::uint64_t number = 1; number <= 3; ++number) {
    std::memset(device.first, static_cast<int>(number), Device::nbytes);
    CHECK(!program.issue());
    CHECK(std::memcmp(device.second, device.first, Device::nbytes) == 0);
    CHECK(device.flags[1] == number);
    CHECK(device.counters[0] == number && device.counters[1] == number);
  }
  CHECK(!CudaProgram(device.issuer).issue());
}

void test_launch_keeps_the_bytes_of_its_parameters() {
  const Setting kernels("FAKE_CUDA_KERNELS", KERNELS);
  Device device;
  void *module = nullptr, *function = nullptr, *popped = nullptr;
  call("cuCtxPushCurrent", device.context);
  call("cuModuleLoadData", &module, static_cast<const void*>("\177ELF"));
  call("cuModuleGetFunction", &function, module, "store");
  call("cuCtxPopCurrent", &popped);
  CudaProgram program(device.issuer);
  {
    std::array<char, 24> words{};
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = static_cast<char>(i);
    const char shift = 5;
    const std::array<CudaProgram::Bytes, 3> parameters = {std::as_bytes(std::span(&device.second, 1)),
                                                          std::as_bytes(std::span(&shift, 1)),
                                                          std::as_bytes(std::span(words))};
    for (int i = 0; i < 20; ++i) program.launch(function, 2, 512, device.stream, parameters);  // so that calls move
  }
  CHECK(!program.issue());
  for (int i = 0; i < 24; ++i) CHECK(device.second[i] == i + 5);
}

void test_failed_call_ends_a_program() {
  Device device;
  CudaProgram program(device.issuer);
  program.raise_flag(address(&device.flags[0]), device.counters[0], device.stream);
  device.copy_to(program);
  program.raise_flag(address(&device.flags[0]), device.counters[0], device.stream);
  const Setting failing("FAKE_CUDA_FAIL", "cuMemcpyAsync=700");
  const auto failure = program.issue();
  CHECK(failure && failure->call == std::string("cuMemcpyAsync") && failure->result == 700);
  CHECK(device.flags[0] == 1 && device.counters[0] == 1);
  const Setting without_context("FAKE_CUDA_FAIL", "cuCtxPushCurrent=201");
  const auto refused = program.issue();
  CHECK(refused && refused->call == std::string("cuCtxPushCurrent") && refused->result == 201);
}

void test_abort_ends_a_program_that_is_held_up() {
  Device device;
  CudaProgram program(device.issuer);
  program.await_flag(address(&device.flags[0]), device.counters[0], device.stream);
  for (int i = 0; i < 5; ++i) device.copy_to(program);
  std::optional<CudaFailure> failure;
  std::thread issuing;
  {
    const Setting depth("FAKE_CUDA_DEPTH", "3");
    issuing = std::thread([&] { failure = program.issue(); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    device.issuer->abort();
    __atomic_store_n(&device.flags[0], 1, __ATOMIC_RELEASE);
    issuing.join();
  }
  CHECK(failure && failure->call == std::string());
}

void test_program_refuses_wrong_sizes() {
  Device device;
  CudaProgram program(device.issuer);
  const std::array<std::byte, 4096> large{};
  const std::array<CudaProgram::Bytes, 2> parameters = {std::span(large), std::span(large).first(1)};
  const std::array<CudaProgram::Bytes, 1> nothing = {CudaProgram::Bytes()};
  const auto refuses = [](auto&& body) { return throws<std::invalid_argument>(body); };
  CHECK(refuses([&] { program.copy(16, 32, 0, device.stream); }));
  CHECK(refuses([&] { program.launch(device.event, 1, 512, device.stream, parameters); }));
  CHECK(refuses([&] { program.launch(device.event, 1, 512, device.stream, nothing); }));
  CHECK(refuses([&] { program.launch(device.event, 0, 512, device.stream, {}); }));
  CHECK(refuses([&] { program.raise_flag(4, device.counters[0], device.stream); }));
  program.launch(device.event, 1, 512, device.stream, std::span(parameters).first(1));
}

}  // namespace

int main() {
  return run_tests({
      {"program_makes_its_calls_in_order_each_time", test_program_makes_its_calls_in_order_each_time},
      {"launch_keeps_the_bytes_of_its_parameters", test_launch_keeps_the_bytes_of_its_parameters},
      {"failed_call_ends_a_program", test_failed_call_ends_a_program},
      {"abort_ends_a_program_that_is_held_up", test_abort_ends_a_program_that_is_held_up},
      {"program_refuses_wrong_sizes", test_program_refuses_wrong_sizes},
  });
}
