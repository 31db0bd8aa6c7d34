// Calls that have been made before, run again without any Python between the user's call and the core.
//
// Theory of operation. Python checks, plans and compiles the first call of a kind, and adds it here under everything
// that decided: the collective, the element type, shapes and memory orders, and the objects given for op, root and
// algorithm. A later call that equals it in all of these is run at once, if its arrays are apart in memory, or lie as
// those of a call in place did that Python has allowed. Whatever is not recognised here (an array of another class, a
// read-only output, a new shape, an op that is equal but another object) is no error but a miss, which Python deals
// with. Arrays are read by numpy's public structure, because the buffer protocol would cost as much as the exchange.
#define NPY_NO_DEPRECATED_API NPY_1_20_API_VERSION
#include <nanobind/stl/string.h>
#include <numpy/ndarraytypes.h>

#include <array>
#include <cstring>
#include <optional>
#include <unordered_map>

#include "started_call.h"

namespace nb = nanobind;

namespace unisono {
namespace {

constexpr int most_axes = 8;
constexpr std::size_t most_calls = 4096;

// What of an array decides about a call.
struct Form {
  PyArray_Descr* descr = nullptr;
  int axes = -1;  // -1: no array
  bool fortran = false;
  npy_intp shape[most_axes];

  bool operator==(const Form& other) const {
    if (descr != other.descr || axes != other.axes || fortran != other.fortran) return false;
    for (int axis = 0; axis < axes; ++axis)
      if (shape[axis] != other.shape[axis]) return false;
    return true;
  }
};

struct Array {
  Form form;
  std::byte* data = nullptr;
  std::size_t count = 0;
};

struct Key {
  PyObject* collective;
  Form x;
  Form out;
  PyObject* op;
  PyObject* root;
  PyObject* algorithm;

  bool operator==(const Key&) const = default;
};

struct KeyHash {
  static std::size_t mix(std::size_t seed, std::size_t value) {
    return (seed ^ value) * 0x9E3779B97F4A7C15ULL + (seed >> 29);
  }
  static std::size_t of(std::size_t seed, const Form& form) {
    seed = mix(mix(seed, reinterpret_cast<std::size_t>(form.descr)), static_cast<std::size_t>(form.axes));
    for (int axis = 0; axis < form.axes; ++axis) seed = mix(seed, static_cast<std::size_t>(form.shape[axis]));
    return seed;
  }
  std::size_t operator()(const Key& key) const {
    std::size_t seed = mix(reinterpret_cast<std::size_t>(key.collective), reinterpret_cast<std::size_t>(key.op));
    seed = mix(seed, reinterpret_cast<std::size_t>(key.root));
    seed = mix(seed, reinterpret_cast<std::size_t>(key.algorithm));
    return of(of(seed, key.x), key.out);
  }
};

class CallCache {
 public:
  CallCache(nb::object endpoint, nb::object array_type, nb::object on_failure, nb::object on_start, double timeout_s)
      : endpoint_(std::move(endpoint)),
        target_(&nb::cast<Endpoint&>(endpoint_)),
        array_type_(std::move(array_type)),
        on_failure_(std::move(on_failure)),
        on_start_(std::move(on_start)),
        timeout_s_(timeout_s) {}

  // True if such a call was known and has been run; false if not, and nothing has been done.
  bool run(nb::handle collective, nb::handle x, nb::handle out, nb::handle op, nb::handle root, nb::handle algorithm,
           nb::handle timeout_s) {
    Array input, output;
    const Entry* entry = recognise(input, output, collective, x, out, op, root, algorithm);
    const std::optional<double> limit_s = limit_of(timeout_s);
    if (entry == nullptr || !limit_s) return false;
    const nb::object held = entry->kept.back();  // the call, lest another thread closes the communicator meanwhile
    const CompiledCall& call = *entry->call;
    const int outcome = run_call(*target_, call, entry->memory(input, BufferKind::input),
                                 entry->memory(output, BufferKind::output), entry->site, *limit_s);
    if (outcome != static_cast<int>(Outcome::done)) on_failure_(outcome, *call.description);
    return true;
  }

  // If such a call is known, starts it, to go on by itself and to fail after `timeout_s`; otherwise returns None, and
  // nothing has been done. Returns what `on_start` makes of it.
  nb::object start(nb::handle collective, nb::handle x, nb::handle out, nb::handle op, nb::handle root,
                   nb::handle algorithm, double timeout_s) {
    Array input, output;
    const Entry* entry = recognise(input, output, collective, x, out, op, root, algorithm);
    if (entry == nullptr || target_->abandoned()) return nb::none();
    std::byte* read = entry->memory(input, BufferKind::input);
    std::byte* written = entry->memory(output, BufferKind::output);
    auto request = target_->start(*entry->call, {{&read, 1}, {&written, 1}}, call_site());
    target_->go_on(*request, timeout_s);
    StartedCall::Kept kept{entry->kept.back(), nb::borrow(x), nb::borrow(out)};
    return on_start_(StartedCall(endpoint_, std::move(kept), std::move(request)), *entry->call->description);
  }

  // Remembers a call, if its arguments are such as `run` recognises; the arrays are those that it is made with.
  void add(nb::object collective, nb::handle x, nb::handle out, nb::object op, nb::object root, nb::object algorithm,
           nb::object call, bool reads, bool writes) {
    Key key;
    Array input, output;
    if (!describe(key, input, output, collective, x, out, op, root, algorithm)) return;
    if (calls_.size() >= most_calls) forget();
    Entry entry{&nb::cast<const CompiledCall&>(call), call_site(), reads, writes, std::nullopt, {}};
    if (const Entry* before = find(key)) entry.in_place_at = before->in_place_at;
    if (entry.overlap(input, output)) entry.in_place_at = output.data - input.data;
    for (PyArray_Descr* descr : {key.x.descr, key.out.descr})
      if (descr != nullptr) entry.kept.push_back(nb::borrow(reinterpret_cast<PyObject*>(descr)));
    entry.kept.insert(entry.kept.end(), {collective, op, root, algorithm, call});
    calls_.insert_or_assign(key, std::move(entry));
  }

  void forget() {
    calls_.clear();
    recent_.fill(nullptr);
  }

 private:
  struct Entry {
    const CompiledCall* call;
    CallSite site;
    bool reads;
    bool writes;
    std::optional<std::ptrdiff_t> in_place_at;  // from the beginning of x to that of out, of a call in place
    std::vector<nb::object> kept;               // whose addresses are in the key, and the call

    std::byte* memory(const Array& array, BufferKind kind) const {
      static std::byte token;  // the INPUT of a barrier
      const bool used = kind == BufferKind::input ? reads : writes;
      return used ? checked_memory(*call, kind, array.data, nbytes(array)) : &token;
    }
    bool overlap(const Array& x, const Array& out) const {
      if (x.count == 0 || out.count == 0) return false;
      return x.data < out.data + nbytes(out) && out.data < x.data + nbytes(x);
    }
    bool may_lie(const Array& x, const Array& out) const {
      return !overlap(x, out) || out.data - x.data == in_place_at;
    }
    std::size_t nbytes(const Array& array) const {
      return array.count * call->program.extents(BufferKind::input).front().itemsize();
    }
  };

  // The entry of a call with these arguments, if there is one and the arrays lie as they may; and the arrays.
  const Entry* recognise(Array& input, Array& output, nb::handle collective, nb::handle x, nb::handle out,
                         nb::handle op, nb::handle root, nb::handle algorithm) {
    Key key;
    if (!describe(key, input, output, collective, x, out, op, root, algorithm)) return nullptr;
    const Entry* entry = find(key);
    return entry != nullptr && entry->may_lie(input, output) ? entry : nullptr;
  }

  bool describe(Key& key, Array& input, Array& output, nb::handle collective, nb::handle x, nb::handle out,
                nb::handle op, nb::handle root, nb::handle algorithm) const {
    if (!describe(input, x, false) || !describe(output, out, true)) return false;
    key.collective = collective.ptr();
    key.x = input.form;
    key.out = output.form;
    key.op = op.ptr();
    key.root = root.ptr();
    key.algorithm = algorithm.ptr();
    return true;
  }

  // None is no array; anything but a contiguous array of numpy's own class is not recognised.
  bool describe(Array& found, nb::handle object, bool written) const {
    if (object.is_none()) return true;
    if (reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) != array_type_.ptr()) return false;
    const auto* array = reinterpret_cast<const PyArrayObject*>(object.ptr());
    const int flags = PyArray_FLAGS(array);
    const int axes = PyArray_NDIM(array);
    if (axes > most_axes || (written && (flags & NPY_ARRAY_WRITEABLE) == 0)) return false;
    if ((flags & (NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS)) == 0) return false;
    found.form.descr = PyArray_DESCR(const_cast<PyArrayObject*>(array));
    found.form.axes = axes;
    found.form.fortran = (flags & NPY_ARRAY_C_CONTIGUOUS) == 0;
    const npy_intp* shape = PyArray_DIMS(const_cast<PyArrayObject*>(array));
    npy_intp elements = 1;
    for (int axis = 0; axis < axes; ++axis) elements *= found.form.shape[axis] = shape[axis];
    found.data = static_cast<std::byte*>(PyArray_DATA(const_cast<PyArrayObject*>(array)));
    found.count = static_cast<std::size_t>(elements);
    return true;
  }

  const Entry* find(const Key& key) {
    const Calls::value_type*& recent = recent_[(reinterpret_cast<std::size_t>(key.collective) >> 5) % recent_.size()];
    if (recent != nullptr && recent->first == key) return &recent->second;
    const auto found = calls_.find(key);
    if (found == calls_.end()) return nullptr;
    recent = &*found;
    return &recent->second;
  }

  std::optional<double> limit_of(nb::handle timeout_s) const {
    if (timeout_s.is_none()) return timeout_s_;
    if (!PyFloat_CheckExact(timeout_s.ptr())) return std::nullopt;
    const double given = PyFloat_AS_DOUBLE(timeout_s.ptr());
    return given > 0 ? std::optional(given) : std::nullopt;
  }

  using Calls = std::unordered_map<Key, Entry, KeyHash>;

  nb::object endpoint_;
  Endpoint* target_;
  nb::object array_type_;
  nb::object on_failure_;
  nb::object on_start_;
  double timeout_s_;
  Calls calls_;
  std::array<const Calls::value_type*, 8> recent_{};  // by the collective's name, whose address it has
};

// A call with its memory, to be run again and again, and what it returns.
class PersistentCall {
 public:
  PersistentCall(nb::object endpoint, nb::object call, nb::handle input, nb::handle output, nb::object on_failure,
                 nb::object on_start, double timeout_s, nb::object result)
      : held_endpoint_(std::move(endpoint)),
        held_call_(std::move(call)),
        on_failure_(std::move(on_failure)),
        on_start_(std::move(on_start)),
        held_input_(input, false),
        held_output_(output, true),
        endpoint_(&nb::cast<Endpoint&>(held_endpoint_)),
        call_(&nb::cast<const CompiledCall&>(held_call_)),
        input_(checked_memory(*call_, BufferKind::input, held_input_.data(), held_input_.nbytes())),
        output_(checked_memory(*call_, BufferKind::output, held_output_.data(), held_output_.nbytes())),
        site_(call_site()),
        timeout_s_(timeout_s),
        result_(std::move(result)) {}

  nb::object run(bool wait) {
    if (!wait) return start();
    const int outcome = run_call(*endpoint_, *call_, input_, output_, site_, timeout_s_);
    if (outcome != static_cast<int>(Outcome::done)) on_failure_(outcome, *call_->description);
    return result_;
  }

 private:
  nb::object start() {
    if (endpoint_->abandoned()) on_failure_(static_cast<int>(Outcome::failed), *call_->description);
    auto request = endpoint_->start(*call_, {{&input_, 1}, {&output_, 1}}, call_site());
    endpoint_->go_on(*request, timeout_s_);
    StartedCall::Kept kept{nb::find(this)};
    return on_start_(StartedCall(held_endpoint_, std::move(kept), std::move(request)), *call_->description, result_);
  }

  nb::object held_endpoint_;
  nb::object held_call_;
  nb::object on_failure_;
  nb::object on_start_;
  Buffer held_input_;
  Buffer held_output_;
  Endpoint* endpoint_;
  const CompiledCall* call_;
  std::byte* input_;
  std::byte* output_;
  CallSite site_;
  double timeout_s_;
  nb::object result_;
};

}  // namespace

namespace {

// A method by Python's own convention of calls, which is tens of nanoseconds quicker than nanobind's.
PyObject* run_from_python(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != 7) {
    PyErr_SetString(PyExc_TypeError, "run takes collective, x, out, op, root, algorithm and timeout_s");
    return nullptr;
  }
  try {
    return PyBool_FromLong(nb::inst_ptr<CallCache>(self)->run(arguments[0], arguments[1], arguments[2], arguments[3],
                                                              arguments[4], arguments[5], arguments[6]));
  } catch (nb::python_error& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace

void bind_call_cache(nb::module_& module) {
  static PyMethodDef methods[] = {
      {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run_from_python)), METH_FASTCALL, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_methods, methods}, {0, nullptr}};
  nb::class_<CallCache>(module, "CallCache", nb::type_slots(slots))
      .def(nb::init<nb::object, nb::object, nb::object, nb::object, double>(), nb::arg("endpoint"),
           nb::arg("array_type"), nb::arg("on_failure"), nb::arg("on_start"), nb::arg("timeout_s"))
      .def("start", &CallCache::start, nb::arg("collective"), nb::arg("x").none(), nb::arg("out").none(),
           nb::arg("op").none(), nb::arg("root").none(), nb::arg("algorithm").none(), nb::arg("timeout_s"))
      .def("add", &CallCache::add, nb::arg("collective"), nb::arg("x").none(), nb::arg("out").none(),
           nb::arg("op").none(), nb::arg("root").none(), nb::arg("algorithm").none(), nb::arg("call"), nb::arg("reads"),
           nb::arg("writes"))
      .def("forget", &CallCache::forget);
  nb::class_<PersistentCall>(module, "PersistentCall")
      .def(nb::init<nb::object, nb::object, nb::handle, nb::handle, nb::object, nb::object, double, nb::object>(),
           nb::arg("endpoint"), nb::arg("call"), nb::arg("input").none(), nb::arg("output").none(),
           nb::arg("on_failure"), nb::arg("on_start"), nb::arg("timeout_s"), nb::arg("result").none())
      .def("__call__", &PersistentCall::run, nb::arg("wait") = true);
}

}  // namespace unisono
