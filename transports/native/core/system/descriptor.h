// `Descriptor` owns a file descriptor, in this process only.
//
// A forked child inherits copies of all descriptors. As long as it keeps them, a peer does not notice the death of the
// parent. So all Descriptor objects are in a list, and the child closes its copies right after the fork. Its objects
// own nothing from then on.
#pragma once

namespace unisono {

//! An owned file descriptor, or none.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int value) { own(value); }
  Descriptor(Descriptor&& other) noexcept { take_over(other); }
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      take_over(other);
    }
    return *this;
  }
  ~Descriptor() { reset(); }

  //! The number of the descriptor; -1 if there is none.
  int get() const { return value_; }
  //! Whether this object holds a descriptor.
  bool valid() const { return value_ >= 0; }
  //! Closes the descriptor.
  void reset();
  //! Returns the descriptor and gives up ownership. Forked children keep their copies of it.
  int release();

 private:
  friend class DescriptorList;
  void own(int value);
  void take_over(Descriptor& other);

  int value_ = -1;
  Descriptor* next_ = nullptr;
  Descriptor* previous_ = nullptr;
};

}  // namespace unisono
