//! Guards of the interpreter's lock that are safe in a program that ends.
//!
//! Until Python 3.13, a thread that takes the lock of an interpreter that ends is ended there by `pthread_exit`. That
//! unwinds its stack, and a destructor, or any other function that must not throw, ends the process by SIGABRT instead.
//! So these guards stop the unwinding and park the thread for ever, as Python 3.14 does by itself. The process then
//! ends with the exit code of its main thread.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

namespace unisono {

//! Whether the interpreter ends. Only a thread that holds the lock can rely on it.
inline bool interpreter_ends() {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

//! Returns the result of `take`, which takes the lock; does not return if the interpreter ends.
template <class Function>
auto take_lock_or_park(Function take) noexcept {
  try {
    return take();
  } catch (...) {  // only the unwinding by pthread_exit comes here, which must not end in this handler
    while (true) ::pause();
  }
}

//! Releases the lock, and retakes it in the end.
class LockReleased {
 public:
  LockReleased() noexcept : state_(PyEval_SaveThread()) {}
  LockReleased(const LockReleased&) = delete;
  LockReleased& operator=(const LockReleased&) = delete;
  ~LockReleased() {
    take_lock_or_park([this] { PyEval_RestoreThread(state_); });
  }

 private:
  PyThreadState* const state_;
};

//! Takes the lock in any thread, and releases it in the end.
class LockTaken {
 public:
  LockTaken() noexcept : state_(take_lock_or_park([] { return PyGILState_Ensure(); })) {}
  LockTaken(const LockTaken&) = delete;
  LockTaken& operator=(const LockTaken&) = delete;
  ~LockTaken() { PyGILState_Release(state_); }

 private:
  const PyGILState_STATE state_;
};

}  // namespace unisono
