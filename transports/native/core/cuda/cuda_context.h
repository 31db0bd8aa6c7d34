// `CudaContext` makes the context of a GPU current in a thread that enters a library which uses the GPU.
#pragma once

namespace unisono {

//! The context of the first device whose memory is seen. Before that there is none, and `Current` does nothing.
class CudaContext {
 public:
  //! Takes the primary context of the device that `pointer` is on, if this object has none yet and a driver is loaded.
  //! Returns this object.
  const CudaContext& adopt(const void* pointer);

  //! Makes the context current in this thread as long as it lives.
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
