//! `Removable`: an object that threads use, by one atomic addition each, until a thread removes it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace unisono {

//! An object that any thread may use until a thread removes it. Its last user destroys it. The `Removable` itself must
//! outlive all uses, and all attempts to use it after it was removed.
template <class T, class Deleter = std::default_delete<T>>
class Removable {
 public:
  explicit Removable(std::unique_ptr<T, Deleter> object) : object_(object.release()) {}
  ~Removable() { destroy(); }
  Removable(const Removable&) = delete;
  Removable& operator=(const Removable&) = delete;

  //! A use of the object, which lives as long as the use. Empty if the object had been removed before.
  class Use {
   public:
    explicit Use(Removable& of) : of_(of) {
      if ((of_.users_.fetch_add(1, std::memory_order_acquire) & removed) == 0)
        object_ = of_.object_.load(std::memory_order_relaxed);
    }
    ~Use() {
      if (of_.users_.fetch_sub(1, std::memory_order_acq_rel) == (removed | 1)) of_.destroy();
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

    explicit operator bool() const { return object_ != nullptr; }
    T& operator*() const { return *object_; }

   private:
    Removable& of_;
    T* object_ = nullptr;
  };

  //! Lets no thread begin to use the object from now on. Does nothing the second time.
  void remove() {
    if (users_.fetch_or(removed, std::memory_order_acq_rel) == 0) destroy();
  }

 private:
  static constexpr std::uint64_t removed = std::uint64_t{1} << 63;

  // A thread that comes too late counts as a user for a moment, so it may find itself the last one again.
  void destroy() { std::unique_ptr<T, Deleter>(object_.exchange(nullptr, std::memory_order_acq_rel)); }

  // The number of users, and the bit `removed`. Users count themselves, and the thread that removes sets the bit.
  std::atomic<std::uint64_t> users_{0};
  std::atomic<T*> object_;  // taken by the thread that destroys it
};

}  // namespace unisono
