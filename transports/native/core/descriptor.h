// Ownership of a file descriptor, by this process alone.
//
// A forked child has copies of all descriptors of its parent. As long as the child keeps them, a peer does not learn
// that the parent has died. So all objects that own a descriptor are in a list, and the child closes its copies right
// after the fork. Its objects own nothing from then on.
#pragma once

namespace unisono {

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

  int get() const { return value_; }
  bool valid() const { return value_ >= 0; }
  // Closes the descriptor.
  void reset();
  // Returns the descriptor, which the caller then owns, also in forked children.
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
