#include "system/signal_events.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <mutex>

namespace unisono {
namespace {

// The events, each plus 1; 0: a free place. The signal handler reads them in any thread, so it takes no mutex.
std::array<std::atomic<int>, 16> notified;
std::mutex changing_notified;  // held by the thread that changes the events or the handler

void add_to_events(int) {
  const int error = errno;
  const std::uint64_t one = 1;
  for (const auto& event : notified)
    if (const int number = event.load()) static_cast<void>(!::write(number - 1, &one, sizeof one));
  errno = error;
}

using Handler = void (*)(int);

Handler current_handler() {
  struct sigaction action{};
  ::sigaction(SIGUSR1, nullptr, &action);
  return action.sa_handler;
}

void set_handler(Handler handler) {
  struct sigaction action{};
  action.sa_handler = handler;
  action.sa_flags = SA_RESTART;
  ::sigaction(SIGUSR1, &action, nullptr);
}

// Returns whether `wanted` was in the table, where `instead` is now.
bool replace(int wanted, int instead) {
  for (auto& event : notified) {
    int expected = wanted;
    if (event.compare_exchange_strong(expected, instead)) return true;
  }
  return false;
}

void give_up_signal() {
  if (current_handler() == add_to_events) set_handler(SIG_DFL);
}

// Forgets all events in a forked child, where the numbers of their descriptors may belong to other files.
void forget_all_in_child() {
  for (auto& event : notified) event = 0;
  give_up_signal();
  changing_notified.unlock();
}

}  // namespace

void notify_of_signal(int event) {
  static const int registered =
      ::pthread_atfork([] { changing_notified.lock(); }, [] { changing_notified.unlock(); }, forget_all_in_child);
  static_cast<void>(registered);
  const std::lock_guard held(changing_notified);
  replace(0, event + 1);
  if (current_handler() == SIG_DFL) set_handler(add_to_events);
}

void forget_signal(int event) {
  const std::lock_guard held(changing_notified);
  replace(event + 1, 0);
  const bool is_last = std::all_of(notified.begin(), notified.end(), [](const auto& other) { return other == 0; });
  if (is_last) give_up_signal();
}

}  // namespace unisono
