//! `CudaProgram`: calls of the CUDA driver that are issued again and again, without Python between them.
//!
//! Theory of operation
//! -------------------
//! Python decides which calls a collective makes (`transports/cuda/executors/executor.py`), and issues them once by
//! itself. When the same collective is called again with the same arrays, the same calls issue it. Only the numbers of
//! flags grow. So a program holds the calls, and for each flag the counter of its numbers.
//!
//! A driver holds up a thread that has issued more to a stream than it can keep. So callers release the interpreter's
//! lock before they issue a program. `abort` ends a program between two calls.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

namespace unisono {

//! The functions of the driver that programs call, as cuda.h declares them. Handles are pointers without a type.
struct CudaFunctions {
  int (*push_context)(void*);
  int (*pop_context)(void**);
  int (*copy)(std::uintptr_t, std::uintptr_t, std::size_t, void*);
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*record)(void*, void*);
  int (*wait)(void*, void*, unsigned);
  int (*write)(void*, std::uintptr_t, std::uint64_t, unsigned);
  int (*wait_value)(void*, std::uintptr_t, std::uint64_t, unsigned);
};

//! One GPU, as programs use it. Any thread may call `abort`.
class CudaIssuer {
 public:
  //! `context` must be valid as long as a program is issued. Throws std::runtime_error if no driver is loaded, or if it
  //! lacks a function.
  explicit CudaIssuer(void* context);

  //! Lets all programs of this GPU fail, also those that are being issued.
  void abort() { is_aborted_ = true; }

 private:
  friend class CudaProgram;
  CudaFunctions functions_{};
  void* context_;
  // Set by any thread. The thread that issues a program reads it before each call of the driver.
  std::atomic<bool> is_aborted_{false};
};

//! A call that the driver refused: its name and the result. The name is empty if the GPU was aborted.
struct CudaFailure {
  const char* call;
  int result;
};

//! A program is built by one thread, and issued by one thread at a time. The memory, events and functions that its
//! calls use must stay valid.
class CudaProgram {
 public:
  using Bytes = std::span<const std::byte>;

  explicit CudaProgram(std::shared_ptr<const CudaIssuer> issuer) : issuer_(std::move(issuer)) {}

  //! Appends a copy of some bytes. Throws std::invalid_argument for none.
  void copy(std::uintptr_t dst, std::uintptr_t src, std::size_t nbytes, void* stream);
  //! Appends the launch of a kernel in a one-dimensional grid. `parameters` are the bytes of each parameter of the
  //! kernel. Throws std::invalid_argument for an empty grid, an empty parameter, or more bytes than a kernel takes.
  void launch(void* function, unsigned blocks, unsigned threads, void* stream, std::span<const Bytes> parameters);
  //! Appends a record of an event.
  void record(void* event, void* stream);
  //! Appends a wait for an event.
  void wait(void* stream, void* event);
  //! Appends the raise of the flag at `address`, or a wait for it. Each issue adds 1 to `counter`, which is then the
  //! number of the flag. Throws std::invalid_argument if `address` is no multiple of 8.
  void raise_flag(std::uintptr_t address, std::uint64_t& counter, void* stream);
  void await_flag(std::uintptr_t address, std::uint64_t& counter, void* stream);

  //! Makes all calls in the context of the GPU, up to the first call that fails, and returns that failure.
  std::optional<CudaFailure> issue() const;

 private:
  struct Copy {
    static constexpr const char* name = "cuMemcpyAsync";
    std::uintptr_t dst, src;
    std::size_t nbytes;
    void* stream;
    int issue(const CudaFunctions& driver) const { return driver.copy(dst, src, nbytes, stream); }
  };
  struct Launch {
    static constexpr const char* name = "cuLaunchKernel";
    void* function;
    unsigned blocks, threads;
    void* stream;
    std::vector<std::max_align_t> memory;  // of the parameters
    std::vector<void*> parameters;
    int issue(const CudaFunctions& driver) const {
      // The driver copies the parameters, and does not change the array of their addresses.
      return driver.launch(function, blocks, 1, 1, threads, 1, 1, 0, stream, const_cast<void**>(parameters.data()),
                           nullptr);
    }
  };
  struct Record {
    static constexpr const char* name = "cuEventRecord";
    void *event, *stream;
    int issue(const CudaFunctions& driver) const { return driver.record(event, stream); }
  };
  struct Wait {
    static constexpr const char* name = "cuStreamWaitEvent";
    void *stream, *event;
    int issue(const CudaFunctions& driver) const { return driver.wait(stream, event, 0); }
  };
  struct RaiseFlag {
    static constexpr const char* name = "cuStreamWriteValue64";
    std::uintptr_t address;
    std::uint64_t* counter;
    void* stream;
    int issue(const CudaFunctions& driver) const { return driver.write(stream, address, ++*counter, 0); }
  };
  struct AwaitFlag {
    static constexpr const char* name = "cuStreamWaitValue64";
    static constexpr unsigned at_least = 0;  // CU_STREAM_WAIT_VALUE_GEQ
    std::uintptr_t address;
    std::uint64_t* counter;
    void* stream;
    int issue(const CudaFunctions& driver) const { return driver.wait_value(stream, address, ++*counter, at_least); }
  };
  using Call = std::variant<Copy, Launch, Record, Wait, RaiseFlag, AwaitFlag>;

  std::optional<CudaFailure> issue_calls() const;

  std::shared_ptr<const CudaIssuer> issuer_;
  std::vector<Call> calls_;
};

}  // namespace unisono
