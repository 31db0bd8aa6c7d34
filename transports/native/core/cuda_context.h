// The context of a GPU, made current in whatever thread enters a library that uses the GPU by itself.
#pragma once

namespace unisono {

// That of the first device whose memory is seen; before, there is none, and nothing is made current.
class CudaContext {
 public:
  // Returns this, which has taken, if it had none, the primary context of the device that `pointer` is on, if that is
  // on any, and there is a driver to tell.
  const CudaContext& adopt(const void* pointer);

  // Current in this thread as long as this exists.
  class Current {
   public:
    explicit Current(const CudaContext& context);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    int (*pop_)(void**) = nullptr;
  };

 private:
  void* context_ = nullptr;  // kept until the process ends
  int (*push_)(void*) = nullptr;
  int (*pop_)(void**) = nullptr;
};

}  // namespace unisono
