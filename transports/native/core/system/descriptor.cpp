#include "system/descriptor.h"

#include <pthread.h>
#include <unistd.h>

#include <mutex>

namespace unisono {

// All objects that own a descriptor. The mutex is held during each change, so a child that is forked meanwhile sees a
// consistent list.
class DescriptorList {
 public:
  // Never destroyed, because objects may outlive static objects.
  static DescriptorList& instance() {
    static DescriptorList* const list = new DescriptorList;
    return *list;
  }

  void own(Descriptor& owner, int value) {
    const std::lock_guard lock(mutex_);
    add(owner, value);
  }

  void move(Descriptor& from, Descriptor& to) {
    const std::lock_guard lock(mutex_);
    add(to, remove(from));
  }

  int release(Descriptor& owner) {
    const std::lock_guard lock(mutex_);
    return remove(owner);
  }

  void close(Descriptor& owner) {
    const std::lock_guard lock(mutex_);
    if (const int value = remove(owner); value >= 0) ::close(value);
  }

 private:
  DescriptorList() {
    ::pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                     [] { instance().close_all_in_child(); });
  }

  void add(Descriptor& owner, int value) {
    if (value < 0) return;
    owner.value_ = value;
    owner.next_ = first_;
    if (first_ != nullptr) first_->previous_ = &owner;
    first_ = &owner;
  }

  int remove(Descriptor& owner) {
    const int value = owner.value_;
    if (value < 0) return value;
    (owner.previous_ != nullptr ? owner.previous_->next_ : first_) = owner.next_;
    if (owner.next_ != nullptr) owner.next_->previous_ = owner.previous_;
    owner.value_ = -1;
    owner.next_ = owner.previous_ = nullptr;
    return value;
  }

  // Runs in the child, which holds the mutex since before the fork.
  void close_all_in_child() {
    while (first_ != nullptr) ::close(remove(*first_));
    mutex_.unlock();
  }

  // Guards the list, and the values of all descriptors in it. A thread that forks holds it, so the child finds the list
  // whole.
  std::mutex mutex_;
  Descriptor* first_ = nullptr;
};

void Descriptor::own(int value) { DescriptorList::instance().own(*this, value); }

void Descriptor::take_over(Descriptor& other) {
  if (other.valid()) DescriptorList::instance().move(other, *this);
}

void Descriptor::reset() {
  if (valid()) DescriptorList::instance().close(*this);
}

int Descriptor::release() { return valid() ? DescriptorList::instance().release(*this) : -1; }

}  // namespace unisono
