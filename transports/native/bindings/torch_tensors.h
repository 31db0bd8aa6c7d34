//! Tensors of torch as the call cache reads them, without a numpy view of each.
//!
//! Theory of operation
//! -------------------
//! A numpy view of a tensor takes half a microsecond, because it is a new Python object. Since version 2.10, torch
//! exports a table of C functions (`__dlpack_c_exchange_api__`, of DLPack 1.3), one of which writes address, shape,
//! strides and type of a tensor into a struct of the caller. Python passes this table here at the first tensor.
//!
//! The table says nothing about three properties for which Python refuses a tensor: that it requires grad, and that it
//! is conjugated or negated only when it is read. So `TensorReader` asks the tensor for them, by methods of torch that
//! run no Python code. Inside a `TorchFunctionMode` they would, so the reader then refuses all tensors. A refused
//! tensor is no error: it is a miss of the call cache, and Python handles the call.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace unisono {

//! A tensor in host memory. `shape` and `strides`, in elements, belong to the tensor.
struct TensorMemory {
  void* data;
  PyObject* dtype;  // that of numpy
  std::int32_t axes;
  const std::int64_t* shape;
  const std::int64_t* strides;

  //! Whether the elements lie one after the other in C order.
  bool is_in_c_order() const { return lies_in_order(axes - 1, -1); }
  //! The same in C order or in Fortran order.
  bool is_contiguous() const;

 private:
  // The index of the axis `first` changes fastest, and the others follow it.
  bool lies_in_order(std::int32_t first, std::int32_t direction) const;
};

//! Reads the tensors of one call. Needs the interpreter's lock.
class TensorReader {
 public:
  //! Whether an object is a tensor of torch's own class, and torch exports its table.
  static bool is_tensor(PyObject* object);
  //! Reads a tensor. False if Python must handle it.
  bool read(PyObject* tensor, TensorMemory& memory);

 private:
  bool modes_checked_ = false;
};

//! Tells autograd that a call has written the tensors in `out`, which is a tensor or a list of them.
void note_writes_of_tensors(nanobind::handle out);

void bind_torch_tensors(nanobind::module_& module);

}  // namespace unisono
