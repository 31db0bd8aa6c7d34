// The floating-point environment of a thread: the rounding mode, whether subnormal numbers count as zero, which
// exceptions stop the program, and which have been raised.
//
// Any library can change the environment of its thread, for example by torch.set_flush_denormal, by fesetround, or as a
// shared object linked with -ffast-math. So it can differ between ranks, and then their results differ in some bits.
#pragma once

#include <cstdint>
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <cfenv>
#endif

namespace unisono {

//! While an object lives, its thread computes in the default environment: it rounds to nearest, subnormal numbers
//! count, and no exception stops the program. Afterwards the thread has its own environment again, with the exceptions
//! that had been raised before.
//!
//! The compiler does not know that arithmetic depends on the environment. So the arithmetic must be in a function that
//! the compiler cannot see here, such as one that is called by its address.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

#if defined(__x86_64__)
  // Comparing the register first would save nothing: on Zen 4, reading it takes 5 ns and writing it 1 ns.
  DefaultFloatEnvironment() : mxcsr_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(default_mxcsr); }
  ~DefaultFloatEnvironment() { __builtin_ia32_ldmxcsr(mxcsr_); }

 private:
  static constexpr std::uint32_t default_mxcsr = 0x1f80;
  const std::uint32_t mxcsr_;
#elif defined(__aarch64__)
  // Writing the control register can stall the pipeline, so it is written only if it is not the default, 0.
  DefaultFloatEnvironment() {
    asm volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(control_), "=r"(raised_)::"memory");
    if (control_ != 0) asm volatile("msr fpcr, xzr" ::: "memory");
  }
  ~DefaultFloatEnvironment() {
    if (control_ != 0) asm volatile("msr fpcr, %0" ::"r"(control_) : "memory");
    asm volatile("msr fpsr, %0" ::"r"(raised_) : "memory");
  }

 private:
  std::uint64_t control_;
  std::uint64_t raised_;
#else
  DefaultFloatEnvironment() {
    std::fegetenv(&environment_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() { std::fesetenv(&environment_); }

 private:
  std::fenv_t environment_;
#endif
};

}  // namespace unisono
