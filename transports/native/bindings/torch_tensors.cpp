#include "torch_tensors.h"

#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

namespace nb = nanobind;

namespace unisono {
namespace {

// The parts of DLPack 1.3 that are used, in its layout.
namespace dlpack {

constexpr std::uint32_t major_version = 1;
constexpr std::int32_t cpu = 1;
enum Code : std::uint8_t { float_code = 2, complex_code = 5, bool_code = 6 };

struct Tensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device;
  std::int32_t axes;
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

// Fills the struct and returns 0. On an error it sets Python's error and returns another number.
using ReadTensor = int (*)(void* object, Tensor* tensor);

struct ExchangeTable {
  std::uint32_t major;
  std::uint32_t minor;
  const ExchangeTable* previous;
  void (*allocate)();
  void (*managed_from_object)();
  void (*object_from_managed)();
  ReadTensor read_tensor;
  void (*current_stream)();
};

}  // namespace dlpack

// All that the core knows of torch. It is set once and lives as long as the process.
struct Torch {
  PyTypeObject* type = nullptr;
  dlpack::ReadTensor read = nullptr;
  std::array<std::array<PyObject*, 256>, 16> dtypes{};  // numpy's, by code and bits
  PyObject* requires_grad = nullptr;                    // the name of the attribute
  PyObject* is_neg = nullptr;
  PyObject* is_conj = nullptr;
  PyObject* count_modes = nullptr;
  PyObject* note_writes = nullptr;
};
Torch torch;

// Whether a function or method of torch returns a true value; true if it raises an error.
bool is_true(PyObject* result) {
  if (result == nullptr) PyErr_Clear();
  const bool is = result == nullptr || PyObject_IsTrue(result) != 0;
  Py_XDECREF(result);
  return is;
}

bool has_obstacle(PyObject* tensor, std::uint8_t code) {
  const bool may_be_negated = code == dlpack::float_code || code == dlpack::complex_code;
  const bool may_require_grad = code >= dlpack::float_code && code != dlpack::bool_code;
  return (may_require_grad && is_true(PyObject_GetAttr(tensor, torch.requires_grad))) ||
         (may_be_negated && is_true(PyObject_CallOneArg(torch.is_neg, tensor))) ||
         (code == dlpack::complex_code && is_true(PyObject_CallOneArg(torch.is_conj, tensor)));
}

PyObject* dtype_of(const dlpack::Tensor& tensor) {
  return tensor.lanes == 1 && tensor.code < torch.dtypes.size() ? torch.dtypes[tensor.code][tensor.bits] : nullptr;
}

// `dtypes`: code and bits of each type of elements, and numpy's dtype. The functions of torch are those of the same
// names. Does nothing if the table is of another major version.
void learn_torch(nb::type_object type, nb::capsule table, const std::vector<std::tuple<int, int, nb::object>>& dtypes,
                 nb::object is_neg, nb::object is_conj, nb::object count_modes, nb::object note_writes) {
  const auto* exchange = static_cast<const dlpack::ExchangeTable*>(table.data("dlpack_exchange_api"));
  if (exchange->major != dlpack::major_version) return;
  for (const auto& [code, bits, dtype] : dtypes)
    torch.dtypes.at(static_cast<std::size_t>(code)).at(static_cast<std::size_t>(bits)) = dtype.inc_ref().ptr();
  torch.requires_grad = PyUnicode_InternFromString("requires_grad");
  torch.is_neg = is_neg.release().ptr();
  torch.is_conj = is_conj.release().ptr();
  torch.count_modes = count_modes.release().ptr();
  torch.note_writes = note_writes.release().ptr();
  torch.read = exchange->read_tensor;
  torch.type = reinterpret_cast<PyTypeObject*>(type.release().ptr());
}

}  // namespace

bool TensorReader::is_tensor(PyObject* object) { return Py_TYPE(object) == torch.type; }

bool TensorReader::read(PyObject* tensor, TensorMemory& memory) {
  if (!modes_checked_ && is_true(PyObject_CallNoArgs(torch.count_modes))) return false;
  modes_checked_ = true;
  dlpack::Tensor read{};
  if (torch.read(tensor, &read) != 0) {
    PyErr_Clear();
    return false;
  }
  PyObject* dtype = dtype_of(read);
  if (dtype == nullptr || read.device_type != dlpack::cpu || has_obstacle(tensor, read.code)) return false;
  memory = {static_cast<char*>(read.data) + read.byte_offset, dtype, read.axes, read.shape, read.strides};
  return read.strides != nullptr || read.axes == 0;
}

bool TensorMemory::is_contiguous() const { return lies_in_order(axes - 1, -1) || lies_in_order(0, 1); }

bool TensorMemory::lies_in_order(std::int32_t first, std::int32_t direction) const {
  if (std::find(shape, shape + axes, 0) != shape + axes) return true;
  std::int64_t distance = 1;
  for (std::int32_t i = 0; i < axes; ++i) {
    const std::int32_t axis = first + i * direction;
    if (shape[axis] != 1 && strides[axis] != distance) return false;
    distance *= shape[axis];
  }
  return true;
}

void note_writes_of_tensors(nb::handle out) {
  PyObject* result = PyObject_CallOneArg(torch.note_writes, out.ptr());
  if (result == nullptr) throw nb::python_error();
  Py_DECREF(result);
}

void bind_torch_tensors(nb::module_& module) {
  module.def("learn_torch", learn_torch, nb::arg("type"), nb::arg("table"), nb::arg("dtypes"), nb::arg("is_neg"),
             nb::arg("is_conj"), nb::arg("count_modes"), nb::arg("note_writes"));
}

}  // namespace unisono
