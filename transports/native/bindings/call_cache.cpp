// `CallCache`: runs repeated calls with no Python between the user's call and the core.
//
// Theory of operation
// -------------------
// Python checks, plans and compiles the first call with some arguments. Then it adds the call here. The key is all that
// has decided about the plan: the collective, the element types, shapes and memory orders, and the objects that were
// passed for op, root and algorithm. For a call on lists, the key has these for each array.
//
// A later call with an equal key runs at once if its arrays do not overlap, or overlap as the arrays of a call that
// Python has allowed. Everything else is a miss, and Python handles it: an array of another class, a read-only output,
// a new shape, or an op that is an equal but different object. A miss is no error.
//
// Arrays are read through numpy's public structure, because the buffer protocol would cost as much as an exchange of 8
// bytes. Tensors of torch are read through torch's own table of functions (torch_tensors.h).
#define NPY_NO_DEPRECATED_API NPY_1_20_API_VERSION
#include <nanobind/stl/string.h>
#include <numpy/ndarraytypes.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "started_call.h"
#include "torch_tensors.h"

namespace nb = nanobind;

namespace unisono {
namespace {

constexpr int most_axes = 8;
constexpr std::size_t most_calls = 4096;
// The number of hash bits for recent calls. Programs repeat a few hundred different calls at most.
constexpr int recent_bits = 9;

// The properties of an array that decide about the plan.
struct Form {
  PyArray_Descr* descr = nullptr;
  int axes = -1;  // -1: None instead of an array
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
  std::byte* data = nullptr;
  std::size_t count = 0;
};

struct Key {
  PyObject* collective = nullptr;
  PyObject* root = nullptr;
  PyObject* algorithm = nullptr;
  std::vector<PyObject*> ops;  // one for all arrays, or one for each
  std::vector<Form> forms;     // of x and out, alternating

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
    std::size_t seed = mix(reinterpret_cast<std::size_t>(key.collective), reinterpret_cast<std::size_t>(key.root));
    seed = mix(seed, reinterpret_cast<std::size_t>(key.algorithm));
    for (PyObject* op : key.ops) seed = mix(seed, reinterpret_cast<std::size_t>(op));
    for (const Form& form : key.forms) seed = of(seed, form);
    return seed;
  }
};

// An argument x, out or op: the items of a list or tuple, or one object.
class Items {
 public:
  explicit Items(nb::handle argument) {
    PyObject* object = argument.ptr();
    is_sequence_ = PyTuple_CheckExact(object) || PyList_CheckExact(object);
    one_ = object;
    items_ = is_sequence_ ? std::span(PySequence_Fast_ITEMS(object), static_cast<std::size_t>(Py_SIZE(object)))
                          : std::span(&one_, 1);
  }
  Items(const Items&) = delete;
  std::size_t size() const { return items_.size(); }
  PyObject* operator[](std::size_t index) const { return items_[index]; }
  bool is_sequence() const { return is_sequence_; }

 private:
  bool is_sequence_;
  PyObject* one_;
  std::span<PyObject*> items_;
};

// Returns a tuple for a list, because the program may change the list later.
nb::object frozen(nb::handle argument) {
  return PyList_CheckExact(argument.ptr()) ? nb::steal(PyList_AsTuple(argument.ptr())) : nb::borrow(argument);
}

class CallCache {
 public:
  CallCache(nb::object endpoint, nb::object array_type, nb::object on_failure, nb::object on_start, double timeout_s)
      : endpoint_(std::move(endpoint)),
        target_(&nb::cast<Endpoint&>(endpoint_)),
        array_type_(std::move(array_type)),
        on_failure_(std::move(on_failure)),
        on_start_(std::move(on_start)),
        timeout_s_(timeout_s) {}

  // Runs the call and returns true if the cache has it. Otherwise returns false, and nothing has happened.
  bool run(nb::handle collective, nb::handle x, nb::handle out, nb::handle op, nb::handle root, nb::handle algorithm,
           nb::handle timeout_s) {
    const std::optional<double> limit_s = limit_of(timeout_s);
    if (!limit_s) return false;
    if (const Entry* entry = repeats_last(collective, x, out, op, root, algorithm)) {
      run_entry(*entry, {std::span(&last_input_, 1), std::span(&last_output_, 1)}, {x, out}, *limit_s);
      return true;
    }
    const Entry* entry = lookup(collective, x, out, op, root, algorithm);
    if (entry == nullptr) return false;
    const bool writes_tensors = has_tensor_to_write_ && entry->writes;
    run_entry(*entry, memory_of(*entry), {x, out}, *limit_s);
    if (writes_tensors) note_writes_of_tensors(out);
    return true;
  }

  // If the cache has the call, starts it with the limit `timeout_s`, and returns the result of `on_start`, which gets
  // None if the call has ended already. If the cache has not the call, returns None, and nothing has happened.
  nb::object start(nb::handle collective, nb::handle x, nb::handle out, nb::handle op, nb::handle root,
                   nb::handle algorithm, double timeout_s) {
    const Entry* entry = lookup(collective, x, out, op, root, algorithm);
    if (entry == nullptr || target_->abandoned()) return nb::none();
    const bool writes_tensors = has_tensor_to_write_ && entry->writes;
    nb::object call = entry->kept.back();
    const SharedDescription description = entry->call->description;
    auto request = start_call(*target_, *entry->call, memory_of(*entry), entry->site, timeout_s);
    // From here on, Python code may run, and use the cache or change a list.
    StartedCall::Kept kept{std::move(call), frozen(x), frozen(out)};
    if (writes_tensors) note_writes_of_tensors(out);
    if (!request) return on_start_(nb::none(), description->text);
    return on_start_(StartedCall(endpoint_, std::move(kept), std::move(request)), description->text);
  }

  bool contains(nb::handle collective, nb::handle x, nb::handle out, nb::handle op, nb::handle root,
                nb::handle algorithm) {
    return lookup(collective, x, out, op, root, algorithm) != nullptr;
  }

  // Adds a call if `run` can recognise its arguments. The arrays are those of the first call.
  void add(nb::object collective, nb::handle x, nb::handle out, nb::object op, nb::object root, nb::object algorithm,
           nb::object call, bool reads, bool writes) {
    if (!describe(collective, x, out, op, root, algorithm)) return;
    if (calls_.size() >= most_calls) forget();
    Entry entry{&nb::cast<const CompiledCall&>(call), call_site(), reads, writes, {}, {}, {}};
    if (const Entry* before = find(key_)) entry.in_place_at = before->in_place_at;
    entry.in_place_at.resize(inputs_.size());
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      const Span in = span_of(entry, inputs_, i);
      const Span to = span_of(entry, outputs_, i);
      if (in.overlaps(to)) entry.in_place_at[i] = to.begin - in.begin;
      entry.nbytes = {static_cast<std::size_t>(in.end - in.begin), static_cast<std::size_t>(to.end - to.begin)};
    }
    for (const Form& form : key_.forms)
      if (form.descr != nullptr) entry.kept.push_back(nb::borrow(reinterpret_cast<PyObject*>(form.descr)));
    for (PyObject* op_object : key_.ops) entry.kept.push_back(nb::borrow(op_object));
    entry.kept.insert(entry.kept.end(), {collective, root, algorithm, call});
    calls_.insert_or_assign(key_, std::move(entry));
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
    std::array<std::size_t, 2> nbytes;  // of x and out, if each is a single array
    // For each array that was used in place: the distance from the beginning of x to that of out.
    std::vector<std::optional<std::ptrdiff_t>> in_place_at;
    std::vector<nb::object> kept;  // the objects whose addresses are in the key, and the call

    const std::vector<Extent>& extents(BufferKind kind) const { return call->program.extents(kind); }
    // If only one of INPUT and OUTPUT is used, the other one is a single extent.
    std::size_t itemsize(std::size_t index) const {
      const auto& of = extents(extents(BufferKind::input).size() > index ? BufferKind::input : BufferKind::output);
      return index < of.size() ? of[index].itemsize() : 0;
    }
  };
  using Calls = std::unordered_map<Key, Entry, KeyHash>;
  // The memory of an array.
  struct Span {
    std::byte* begin;
    std::byte* end;

    bool overlaps(const Span& other) const { return begin < other.end && other.begin < end; }
  };

  void run_entry(const Entry& entry, const Memory& memory, MemoryOwners owners, double limit_s) {
    const nb::object held = entry.kept.back();  // the call, in case another thread closes the communicator meanwhile
    const CompiledCall& call = *entry.call;
    const int outcome = run_call(*target_, call, memory, owners, entry.site, limit_s);
    if (outcome != static_cast<int>(Outcome::done)) on_failure_(outcome, call.description->text);
  }

  // Returns the entry of the last call of this collective with this length, if it was on single arrays and this call
  // has the same key. That is the most frequent case. Sets `last_input_` and `last_output_`.
  const Entry* repeats_last(nb::handle collective, nb::handle x, nb::handle out, nb::handle op, nb::handle root,
                            nb::handle algorithm) {
    const Calls::value_type* last = recent(collective.ptr(), length_of(x.ptr()));
    if (last == nullptr) return nullptr;
    const auto& [key, entry] = *last;
    const bool is_single = key.forms.size() == 2 && key.ops.size() == 1;
    if (!is_single || key.collective != collective.ptr() || key.ops[0] != op.ptr() || key.root != root.ptr() ||
        key.algorithm != algorithm.ptr())
      return nullptr;
    if (!has_form(key.forms[0], x.ptr(), false, last_input_) || !has_form(key.forms[1], out.ptr(), true, last_output_))
      return nullptr;
    const Span in{last_input_, last_input_ + entry.nbytes[0]};
    const Span to{last_output_, last_output_ + entry.nbytes[1]};
    if (in.overlaps(to) && to.begin - in.begin != entry.in_place_at[0]) return nullptr;
    if (!entry.reads) last_input_ = &token_;
    if (!entry.writes) last_output_ = &token_;
    return &entry;
  }

  // Returns the entry of a call with these arguments, if there is one and the arrays overlap only as allowed.
  const Entry* lookup(nb::handle collective, nb::handle x, nb::handle out, nb::handle op, nb::handle root,
                      nb::handle algorithm) {
    if (!describe(collective, x, out, op, root, algorithm)) return nullptr;
    const Entry* entry = find(key_);
    return entry != nullptr && overlaps_as_allowed(*entry) ? entry : nullptr;
  }

  // The functions below use the arrays of the last `describe`.

  Memory memory_of(const Entry& entry) {
    return {addresses_of(entry, BufferKind::input), addresses_of(entry, BufferKind::output)};
  }

  std::span<std::byte* const> addresses_of(const Entry& entry, BufferKind kind) {
    const bool reads = kind == BufferKind::input;
    auto& addresses = reads ? input_addresses_ : output_addresses_;
    addresses.clear();
    if (!(reads ? entry.reads : entry.writes)) {
      addresses.push_back(&token_);
      return addresses;
    }
    const auto& arrays = reads ? inputs_ : outputs_;
    const auto& extents = entry.extents(kind);
    for (std::size_t i = 0; i < extents.size(); ++i)
      addresses.push_back(checked_memory(extents[i], arrays[i].data, arrays[i].count * extents[i].itemsize()));
    return addresses;
  }

  static Span span_of(const Entry& entry, const std::vector<Array>& arrays, std::size_t index) {
    const Array& array = arrays[index];
    return {array.data, array.data + array.count * entry.itemsize(index)};
  }

  bool overlaps_as_allowed(const Entry& entry) {
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      const Span in = span_of(entry, inputs_, i);
      const Span to = span_of(entry, outputs_, i);
      if (in.overlaps(to) && to.begin - in.begin != entry.in_place_at[i]) return false;
    }
    return inputs_.size() == 1 || writes_are_apart(entry);
  }

  // Whether no array that is written overlaps another array of the list.
  bool writes_are_apart(const Entry& entry) {
    spans_.clear();
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      const Span in = span_of(entry, inputs_, i);
      const Span to = span_of(entry, outputs_, i);
      if (in.overlaps(to)) {
        spans_.emplace_back(Span{std::min(in.begin, to.begin), std::max(in.end, to.end)}, true);
      } else {
        spans_.emplace_back(to, true);
        spans_.emplace_back(in, false);
      }
    }
    std::sort(spans_.begin(), spans_.end(),
              [](const auto& one, const auto& other) { return one.first.begin < other.first.begin; });
    std::byte* end = nullptr;
    std::byte* written_end = nullptr;
    for (const auto& [span, written] : spans_) {
      if (span.begin == span.end) continue;
      if (span.begin < (written ? end : written_end)) return false;
      end = std::max(end, span.end);
      if (written) written_end = std::max(written_end, span.end);
    }
    return true;
  }

  // Whether `describe` would produce this form; sets `data`.
  bool has_form(const Form& form, PyObject* object, bool written, std::byte*& data) const {
    data = nullptr;
    if (object == Py_None) return form.descr == nullptr;
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != array_type_.ptr()) return false;
    auto* array = reinterpret_cast<PyArrayObject*>(object);
    if (PyArray_DESCR(array) != form.descr || PyArray_NDIM(array) != form.axes) return false;
    const int flags = PyArray_FLAGS(array);
    const bool is_c = (flags & NPY_ARRAY_C_CONTIGUOUS) != 0;
    if (is_c == form.fortran || (!is_c && (flags & NPY_ARRAY_F_CONTIGUOUS) == 0)) return false;
    if (written && (flags & NPY_ARRAY_WRITEABLE) == 0) return false;
    const npy_intp* shape = PyArray_DIMS(array);
    for (int axis = 0; axis < form.axes; ++axis)
      if (shape[axis] != form.shape[axis]) return false;
    data = static_cast<std::byte*>(PyArray_DATA(array));
    return true;
  }

  bool describe(nb::handle collective, nb::handle x, nb::handle out, nb::handle op, nb::handle root,
                nb::handle algorithm) {
    const Items sources(x), targets(out), ops(op);
    // A list of arrays comes with a list of outs, or with None for all of them.
    const bool has_targets = !sources.is_sequence() || !out.is_none();
    if (has_targets && (targets.size() != sources.size() || targets.is_sequence() != sources.is_sequence()))
      return false;
    key_.collective = collective.ptr();
    key_.root = root.ptr();
    key_.algorithm = algorithm.ptr();
    key_.ops.clear();
    for (std::size_t i = 0; i < ops.size(); ++i) key_.ops.push_back(ops[i]);
    key_.forms.resize(2 * sources.size());
    inputs_.assign(sources.size(), {});
    outputs_.assign(sources.size(), {});
    has_tensor_to_write_ = false;
    TensorReader tensors;
    for (std::size_t i = 0; i < sources.size(); ++i) {
      PyObject* target = has_targets ? targets[i] : Py_None;
      Form& from = key_.forms[2 * i];
      Form& to = key_.forms[2 * i + 1];
      if (!describe(from, inputs_[i], sources[i], false, tensors)) return false;
      if (TensorReader::is_tensor(target)) {
        has_tensor_to_write_ = true;
        if (target == sources[i]) {
          to = from;
          outputs_[i] = inputs_[i];
          continue;
        }
      }
      if (!describe(to, outputs_[i], target, true, tensors)) return false;
    }
    return true;
  }

  // None is allowed. Any other object must be a contiguous array of numpy's own class, or such a tensor of torch.
  bool describe(Form& form, Array& memory, PyObject* object, bool written, TensorReader& tensors) const {
    form.descr = nullptr;
    form.axes = -1;
    form.fortran = false;
    if (object == Py_None) return true;
    if (TensorReader::is_tensor(object)) return describe_tensor(form, memory, object, tensors);
    if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != array_type_.ptr()) return false;
    const auto* array = reinterpret_cast<const PyArrayObject*>(object);
    const int flags = PyArray_FLAGS(array);
    const int axes = PyArray_NDIM(array);
    if (axes > most_axes || (written && (flags & NPY_ARRAY_WRITEABLE) == 0)) return false;
    if ((flags & (NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_F_CONTIGUOUS)) == 0) return false;
    form.descr = PyArray_DESCR(const_cast<PyArrayObject*>(array));
    form.axes = axes;
    form.fortran = (flags & NPY_ARRAY_C_CONTIGUOUS) == 0;
    const npy_intp* shape = PyArray_DIMS(const_cast<PyArrayObject*>(array));
    npy_intp elements = 1;
    for (int axis = 0; axis < axes; ++axis) elements *= form.shape[axis] = shape[axis];
    memory.data = static_cast<std::byte*>(PyArray_DATA(const_cast<PyArrayObject*>(array)));
    memory.count = static_cast<std::size_t>(elements);
    return true;
  }

  static bool describe_tensor(Form& form, Array& memory, PyObject* object, TensorReader& tensors) {
    TensorMemory tensor;
    if (!tensors.read(object, tensor) || tensor.axes > most_axes) return false;
    form.descr = reinterpret_cast<PyArray_Descr*>(tensor.dtype);
    form.axes = tensor.axes;
    std::int64_t elements = 1;
    for (int axis = 0; axis < form.axes; ++axis) elements *= form.shape[axis] = tensor.shape[axis];
    if (elements != 0 && tensor.data == nullptr) return false;  // the program has freed its memory
    form.fortran = !tensor.is_in_c_order();
    memory = {static_cast<std::byte*>(tensor.data), static_cast<std::size_t>(elements)};
    return !form.fortran || tensor.is_contiguous();
  }

  const Entry* find(const Key& key) {
    const Calls::value_type*& last = recent(key.collective, length_of(key));
    if (last != nullptr && last->first == key) return &last->second;
    const auto entry = calls_.find(key);
    if (entry == calls_.end()) return nullptr;
    last = &*entry;
    return &last->second;
  }

  const Calls::value_type*& recent(const PyObject* collective, npy_intp length) {
    return recent_[KeyHash::mix(reinterpret_cast<std::size_t>(collective), static_cast<std::size_t>(length)) >>
                   (64 - recent_bits)];
  }

  // The length of the first array's first axis, in which calls of one collective differ most.
  npy_intp length_of(PyObject* x) const {
    if (reinterpret_cast<PyObject*>(Py_TYPE(x)) != array_type_.ptr()) return 0;
    auto* array = reinterpret_cast<PyArrayObject*>(x);
    return PyArray_NDIM(array) > 0 ? PyArray_DIMS(array)[0] : 0;
  }
  static npy_intp length_of(const Key& key) {
    return !key.forms.empty() && key.forms[0].axes > 0 ? key.forms[0].shape[0] : 0;
  }

  std::optional<double> limit_of(nb::handle timeout_s) const {
    if (timeout_s.is_none()) return timeout_s_;
    if (!PyFloat_CheckExact(timeout_s.ptr())) return std::nullopt;
    const double seconds = PyFloat_AS_DOUBLE(timeout_s.ptr());
    return seconds > 0 ? std::optional(seconds) : std::nullopt;
  }

  nb::object endpoint_;
  Endpoint* target_;
  nb::object array_type_;
  nb::object on_failure_;
  nb::object on_start_;
  double timeout_s_;
  Calls calls_;
  std::byte token_{};  // the INPUT of a barrier
  // The index is a hash of the address of the collective's name and the length of the array.
  std::array<const Calls::value_type*, 1 << recent_bits> recent_{};
  // The addresses of x and out in the call that `repeats_last` has recognised.
  std::byte* last_input_ = nullptr;
  std::byte* last_output_ = nullptr;
  // The results of the last `describe`. They are members, so that small calls allocate nothing.
  Key key_;
  std::vector<Array> inputs_;
  std::vector<Array> outputs_;
  std::vector<std::byte*> input_addresses_;
  std::vector<std::byte*> output_addresses_;
  std::vector<std::pair<Span, bool>> spans_;  // and whether it is written
  bool has_tensor_to_write_ = false;
};

// Serves calls from a cache until `remaining` of them have run, and no call after that. The program of a rank then sets
// `remaining` anew, so Python gets one call in a number. Without a CallCache, it serves none.
class PacedCache {
 public:
  explicit PacedCache(nb::object cache)
      : held_(std::move(cache)), cache_(nb::isinstance<CallCache>(held_) ? nb::inst_ptr<CallCache>(held_) : nullptr) {}

  bool run(PyObject* const* arguments) {
    if (cache_ == nullptr || remaining_ <= 0) return false;
    if (!cache_->run(arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5], arguments[6]))
      return false;
    --remaining_;
    return true;
  }

  // Started calls are not counted.
  nb::object start(nb::handle collective, nb::handle x, nb::handle out, nb::handle op, nb::handle root,
                   nb::handle algorithm, double timeout_s) {
    if (cache_ == nullptr) return nb::none();
    return cache_->start(collective, x, out, op, root, algorithm, timeout_s);
  }

  void forget() {
    if (cache_ != nullptr) cache_->forget();
  }

  std::int64_t remaining() const { return remaining_; }
  void set_remaining(std::int64_t calls) { remaining_ = calls; }

 private:
  nb::object held_;
  CallCache* cache_;
  std::int64_t remaining_ = 0;
};

// A call bound to its memory, with the result that it returns. It runs any number of times.
class PersistentCall {
 public:
  PersistentCall(nb::object endpoint, nb::object call, nb::handle inputs, nb::handle outputs, nb::object on_failure,
                 nb::object on_start, double timeout_s, nb::object result)
      : held_endpoint_(std::move(endpoint)),
        held_call_(std::move(call)),
        on_failure_(std::move(on_failure)),
        on_start_(std::move(on_start)),
        endpoint_(&nb::cast<Endpoint&>(held_endpoint_)),
        call_(&nb::cast<const CompiledCall&>(held_call_)),
        inputs_(*call_, BufferKind::input, inputs),
        outputs_(*call_, BufferKind::output, outputs),
        site_(call_site()),
        timeout_s_(timeout_s),
        result_(std::move(result)) {}

  nb::object run(bool wait) {
    if (!wait) return start();
    const int outcome = run_call(*endpoint_, *call_, memory(), {nb::find(this), {}}, site_, timeout_s_);
    if (outcome != static_cast<int>(Outcome::done)) on_failure_(outcome, call_->description->text);
    return result_;
  }

 private:
  Memory memory() const { return {inputs_.addresses(), outputs_.addresses()}; }

  nb::object start() {
    if (endpoint_->abandoned()) on_failure_(static_cast<int>(Outcome::failed), call_->description->text);
    auto request = start_call(*endpoint_, *call_, memory(), site_, timeout_s_);
    if (!request) return on_start_(nb::none(), call_->description->text, result_);
    StartedCall::Kept kept{nb::find(this)};
    return on_start_(StartedCall(held_endpoint_, std::move(kept), std::move(request)), call_->description->text,
                     result_);
  }

  nb::object held_endpoint_;
  nb::object held_call_;
  nb::object on_failure_;
  nb::object on_start_;
  Endpoint* endpoint_;
  const CompiledCall* call_;
  Operands inputs_;
  Operands outputs_;
  CallSite site_;
  double timeout_s_;
  nb::object result_;
};

}  // namespace

namespace {

// Uses Python's own calling convention, which is tens of nanoseconds faster than nanobind's.
PyObject* run_from_python(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  if (count != static_cast<Py_ssize_t>(cache_arguments)) {
    PyErr_SetString(PyExc_TypeError, "run takes collective, x, out, op, root, algorithm and timeout_s");
    return nullptr;
  }
  const CacheResult result = run_cached(self, arguments);
  return result == CacheResult::failed ? nullptr : PyBool_FromLong(result == CacheResult::hit);
}

PyTypeObject* call_cache_type = nullptr;
PyTypeObject* paced_cache_type = nullptr;

CacheResult run_paced(PyObject* cache, PyObject* const* arguments) {
  if (Py_TYPE(cache) != paced_cache_type) return CacheResult::miss;
  return or_error(CacheResult::failed, [&] {
    return nb::inst_ptr<PacedCache>(cache)->run(arguments) ? CacheResult::hit : CacheResult::miss;
  });
}

// Makes a persistent call by Python's own calling convention. Most calls have no arguments, so none are parsed then.
PyObject* call_plan(PyObject* self, PyObject* args, PyObject* kwargs) {
  int wait = 1;
  if (PyTuple_GET_SIZE(args) != 0 || kwargs != nullptr) {
    static const char* names[] = {"wait", nullptr};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|p:plan", const_cast<char**>(names), &wait)) return nullptr;
  }
  return or_error(static_cast<PyObject*>(nullptr),
                  [&] { return nb::inst_ptr<PersistentCall>(self)->run(wait != 0).release().ptr(); });
}

}  // namespace

CacheResult run_cached(PyObject* cache, PyObject* const* arguments) {
  if (Py_TYPE(cache) != call_cache_type) return run_paced(cache, arguments);
  return or_error(CacheResult::failed, [&] {
    const bool hit = nb::inst_ptr<CallCache>(cache)->run(arguments[0], arguments[1], arguments[2], arguments[3],
                                                         arguments[4], arguments[5], arguments[6]);
    return hit ? CacheResult::hit : CacheResult::miss;
  });
}

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
      .def("contains", &CallCache::contains, nb::arg("collective"), nb::arg("x").none(), nb::arg("out").none(),
           nb::arg("op").none(), nb::arg("root").none(), nb::arg("algorithm").none())
      .def("forget", &CallCache::forget);
  call_cache_type = reinterpret_cast<PyTypeObject*>(module.attr("CallCache").ptr());
  nb::class_<PacedCache>(module, "PacedCache", nb::type_slots(slots))
      .def(nb::init<nb::object>(), nb::arg("cache"))
      .def("start", &PacedCache::start, nb::arg("collective"), nb::arg("x").none(), nb::arg("out").none(),
           nb::arg("op").none(), nb::arg("root").none(), nb::arg("algorithm").none(), nb::arg("timeout_s"))
      // A call that the cache holds may be the next that it does not serve.
      .def("contains", [](const PacedCache&, const nb::args&) { return false; })
      .def("forget", &PacedCache::forget)
      .def_prop_rw("remaining", &PacedCache::remaining, &PacedCache::set_remaining);
  paced_cache_type = reinterpret_cast<PyTypeObject*>(module.attr("PacedCache").ptr());
  static PyType_Slot plan_slots[] = {{Py_tp_call, reinterpret_cast<void*>(call_plan)}, {0, nullptr}};
  nb::class_<PersistentCall>(module, "PersistentCall", nb::type_slots(plan_slots))
      .def(nb::init<nb::object, nb::object, nb::handle, nb::handle, nb::object, nb::object, double, nb::object>(),
           nb::arg("endpoint"), nb::arg("call"), nb::arg("inputs"), nb::arg("outputs"), nb::arg("on_failure"),
           nb::arg("on_start"), nb::arg("timeout_s"), nb::arg("result").none());
}

}  // namespace unisono
