#include <array>
#include <atomic>
#include <memory>
#include <thread>

#include "check.h"
#include "system/removable.h"

using namespace unisono;
using namespace unisono::testing;

namespace {

// Counts its destructions. `value` is written by the destructor, so that a use after it is a race.
struct Counted {
  explicit Counted(std::atomic<int>& count) : destroyed(count) {}
  ~Counted() {
    value = -1;
    destroyed.fetch_add(1);
  }
  std::atomic<int>& destroyed;
  int value = 7;
};

using Entry = Removable<Counted>;

void an_object_is_used_until_it_is_removed() {
  std::atomic<int> destroyed{0};
  Entry entry(std::make_unique<Counted>(destroyed));
  {
    const Entry::Use use(entry);
    CHECK(use && (*use).value == 7);
  }
  CHECK(destroyed == 0);
  entry.remove();
  entry.remove();
  CHECK(destroyed == 1 && !Entry::Use(entry) && destroyed == 1);
}

void the_last_user_destroys_a_removed_object() {
  std::atomic<int> destroyed{0};
  Entry entry(std::make_unique<Counted>(destroyed));
  {
    const Entry::Use first(entry);
    {
      const Entry::Use second(entry);
      entry.remove();
      const Entry::Use late(entry);
      CHECK(first && second && !late);
    }
    CHECK(destroyed == 0 && (*first).value == 7);
  }
  CHECK(destroyed == 1);
}

void an_object_that_nobody_removes_ends_with_its_entry() {
  std::atomic<int> destroyed{0};
  {
    const Entry entry(std::make_unique<Counted>(destroyed));
  }
  CHECK(destroyed == 1);
}

// Threads use an object while another one removes it. Each time it is destroyed once, and nobody uses it afterwards.
void threads_may_use_an_object_while_one_removes_it() {
  constexpr int turns = 300;
  for (int turn = 0; turn < turns; ++turn) {
    std::atomic<int> destroyed{0};
    std::atomic<int> wrong{0};
    Entry entry(std::make_unique<Counted>(destroyed));
    std::atomic<int> begun{0};
    const auto use_until_removed = [&] {
      for (begun.fetch_add(1);;) {
        const Entry::Use use(entry);
        if (!use) return;
        if ((*use).value != 7) wrong.fetch_add(1);
      }
    };
    std::array<std::thread, 3> users;
    for (std::thread& user : users) user = std::thread(use_until_removed);
    while (begun.load() != static_cast<int>(users.size())) std::this_thread::yield();
    entry.remove();
    for (std::thread& user : users) user.join();
    CHECK(destroyed == 1 && wrong == 0);
  }
}

}  // namespace

int main() {
  return run_tests({
      {"an object is used until it is removed", an_object_is_used_until_it_is_removed},
      {"the last user destroys a removed object", the_last_user_destroys_a_removed_object},
      {"an object that nobody removes ends with its entry", an_object_that_nobody_removes_ends_with_its_entry},
      {"threads may use an object while one removes it", threads_may_use_an_object_while_one_removes_it},
  });
}
