// Theory of operation
// -------------------
// Python's handler of SIGINT only sets a flag. The main thread raises KeyboardInterrupt when it next runs Python. A
// main thread that waits for a program of XLA does not run Python, and another thread cannot read the flag.
//
// So this file puts a handler in front of Python's, which counts signals. A thread that waits compares the count with
// the number of signals that Python has handled. It learns that number by a pending call: the main thread runs it when
// it next runs Python, right after the signal handler. If it does not run within some milliseconds, the main thread is
// stuck, and the wait must end.
#include "keyboard_interrupt.h"

#include <nanobind/nanobind.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <mutex>
#include <thread>

#include "python_lock.h"

namespace nb = nanobind;

namespace unisono {
namespace {

constexpr std::chrono::milliseconds time_for_python{20};

// How many signals have come. The signal handler counts, in any thread.
std::atomic<std::uintptr_t> signals{0};
// How many of them Python has handled. The main thread notes it in a pending call, and a waiting thread may note it
// too.
std::atomic<std::uintptr_t> signals_handled{0};
std::mutex watching;                    // held by the thread that replaces the handler
struct sigaction handler_of_program{};  // changed only while `count_signal` is not the handler

void count_signal(int number, siginfo_t* info, void* context) {
  signals.fetch_add(1);
  if ((handler_of_program.sa_flags & SA_SIGINFO) != 0)
    handler_of_program.sa_sigaction(number, info, context);
  else
    handler_of_program.sa_handler(number);
}

bool is_counting(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) != 0 && action.sa_sigaction == count_signal;
}

bool has_no_handler(const struct sigaction& action) {
  return (action.sa_flags & SA_SIGINFO) == 0 && (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN);
}

int note_handled(void* count) {
  signals_handled = reinterpret_cast<std::uintptr_t>(count);
  return 0;
}

bool handles(std::uintptr_t count) {
  Py_AddPendingCall(note_handled, reinterpret_cast<void*>(count));
  const auto until = std::chrono::steady_clock::now() + time_for_python;
  while (signals_handled != count && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return signals_handled == count;
}

// Another handler may want the program to go on.
bool raises_interrupt() {
  if (interpreter_ends()) return true;
  const LockTaken lock;
  try {
    const nb::module_ signal = nb::module_::import_("signal");
    return signal.attr("getsignal")(SIGINT).is(signal.attr("default_int_handler"));
  } catch (const nb::python_error&) {
    return true;
  }
}

}  // namespace

void watch_keyboard() {
  const std::lock_guard lock(watching);
  struct sigaction action{};
  ::sigaction(SIGINT, nullptr, &action);
  if (is_counting(action) || has_no_handler(action)) return;
  handler_of_program = action;
  action.sa_sigaction = count_signal;
  action.sa_flags |= SA_SIGINFO;
  ::sigaction(SIGINT, &action, nullptr);
}

bool keyboard_interrupted() {
  const std::uintptr_t count = signals;
  if (count == signals_handled || handles(count)) return false;
  if (raises_interrupt()) return true;
  signals_handled = count;
  return false;
}

}  // namespace unisono
