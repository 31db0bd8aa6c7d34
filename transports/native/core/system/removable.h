//! `Removable`: an object that threads use until one of them removes it. A use begins with one atomic addition.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

namespace unisono {

//! An object that any thread may use until a thread removes it. The last user of a removed object destroys it. The
//! `Removable` itself must outlive all uses, and all attempts to use the object after its removal.
template <class T, class Deleter = std::default_delete<T>>
class Removable {
 public:
  explicit Removable(std::unique_ptr<T, Deleter> object) : object_(object.release()) {}
  ~Removable() { destroy(); }
  Removable(const Removable&) = delete;
  Removable& operator=(const Removable&) = delete;

  //! A use of the object, which keeps the object alive. Empty if a thread had removed the object before.
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

  //! Keeps all threads from new uses of the object. A second call does nothing.
  void remove() {
    if (users_.fetch_or(removed, std::memory_order_acq_rel) == 0) destroy();
  }

 private:
  static constexpr std::uint64_t removed = std::uint64_t{1} << 63;

  // Runs more than once if a thread comes too late: it counts as a user for a moment, and may be the last one again.
  // Then the object is null.
  void destroy() { std::unique_ptr<T, Deleter>(object_.exchange(nullptr, std::memory_order_acq_rel)); }

  // The number of users, and the bit `removed`. Users count themselves, and the thread that removes the object sets
  // the bit.
  std::atomic<std::uint64_t> users_{0};
  std::atomic<T*> object_;  // null after a thread has destroyed it
};

}  // namespace unisono
