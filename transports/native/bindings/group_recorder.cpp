// `GroupRecorder`: records the calls of a `with world.group()` block without any Python frame.
//
// Each call is appended to the lists of its batch. A batch holds the calls with the same collective, root and
// algorithm. Python is asked for the batch only the first time such a triple appears, and it validates the calls when
// the group ends.
//
// During a group, the recorder takes the place of the communicator's call cache, where every look-up is a miss, and of
// the function that runs missed calls.
#include <nanobind/stl/pair.h>
#include <structmember.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "python_call.h"

namespace nb = nanobind;

namespace unisono {
namespace {

class GroupRecorder {
 public:
  // `open(collective, root, counts, algorithm)` returns a batch and whether further calls may join it. A batch has the
  // lists x, outs, targets, ops and timeouts_s. `work_type` is a class with the slots `_outcome`, for the batch, and
  // `_index`.
  GroupRecorder(nb::object open, nb::object work_type)
      : open_(std::move(open)),
        work_type_(std::move(work_type)),
        outcome_at_(offset_of(work_type_, "_outcome")),
        index_at_(offset_of(work_type_, "_index")) {}

  struct Call {
    nb::handle collective, x, out, target, op, root, counts, algorithm, timeout_s;
  };

  // Records a call, and returns its work.
  nb::object add(const Call& call) {
    const Batch* batch = call.counts.is_none() ? find(call) : nullptr;
    return batch != nullptr ? put(call, *batch) : put(call, open(call));
  }

 private:
  struct Batch {
    nb::object collective, root, algorithm;  // kept alive, because batches are recognised by their addresses
    nb::object itself;
    std::array<nb::object, 5> lists;
  };

  nb::object put(const Call& call, const Batch& batch) const {
    const Py_ssize_t index = PyList_GET_SIZE(batch.lists[0].ptr());
    append(batch.lists[0], call.x);
    append(batch.lists[1], call.out);
    append(batch.lists[2], call.target);
    append(batch.lists[3], call.op);
    if (!call.timeout_s.is_none()) append(batch.lists[4], call.timeout_s);
    return work(batch, index);
  }

  static void append(nb::handle list, nb::handle item) {
    if (PyList_Append(list.ptr(), item.ptr()) != 0) throw nb::python_error();
  }

  const Batch* find(const Call& call) const {
    for (const Batch& batch : batches_)
      if (batch.collective.is(call.collective) && batch.root.is(call.root) && batch.algorithm.is(call.algorithm))
        return &batch;
    return nullptr;
  }

  Batch open(const Call& call) {
    const nb::object answer = open_(call.collective, call.root, call.counts, call.algorithm);
    const auto [itself, takes_more] = nb::cast<std::pair<nb::object, bool>>(answer);
    Batch batch{nb::borrow(call.collective), nb::borrow(call.root), nb::borrow(call.algorithm), itself, {}};
    std::size_t next = 0;
    for (const char* name : {"x", "outs", "targets", "ops", "timeouts_s"}) {
      batch.lists[next] = itself.attr(name);
      if (!PyList_CheckExact(batch.lists[next++].ptr())) throw nb::type_error("a batch has lists");
    }
    if (takes_more) keep(batch);
    return batch;
  }

  // Keeps a batch for later calls. `find` compares arguments by their addresses, and equal arguments may be other
  // objects in each call, as large ints are. So a batch that is kept already is replaced, with the arguments of this
  // call.
  void keep(const Batch& batch) {
    const auto before = std::find_if(batches_.begin(), batches_.end(),
                                     [&](const Batch& other) { return other.itself.is(batch.itself); });
    if (before == batches_.end()) {
      batches_.push_back(batch);
    } else {
      *before = batch;
    }
  }

  // Creates the object that ``work_type(batch, index)`` would return, without a Python call: it fills the slots of a
  // new object.
  nb::object work(const Batch& batch, Py_ssize_t index) const {
    auto* type = reinterpret_cast<PyTypeObject*>(work_type_.ptr());
    nb::object work = nb::steal(type->tp_alloc(type, 0));
    PyObject* const number = work ? PyLong_FromSsize_t(index) : nullptr;
    if (number == nullptr) throw nb::python_error();
    slot(work, outcome_at_) = nb::object(batch.itself).release().ptr();
    slot(work, index_at_) = number;
    return work;
  }

  static PyObject*& slot(nb::handle object, Py_ssize_t offset) {
    return *reinterpret_cast<PyObject**>(reinterpret_cast<std::byte*>(object.ptr()) + offset);
  }

  static Py_ssize_t offset_of(nb::handle type, const char* slot) {
    const nb::object descriptor = type.attr(slot);
    if (!Py_IS_TYPE(descriptor.ptr(), &PyMemberDescr_Type)) throw nb::type_error("works have slots");
    return reinterpret_cast<PyMemberDescrObject*>(descriptor.ptr())->d_member->offset;
  }

  nb::object open_;
  nb::object work_type_;
  Py_ssize_t outcome_at_;
  Py_ssize_t index_at_;
  std::vector<Batch> batches_;
};

// The arguments of `add`: the first four are positional, and the others are optional keywords in any order.
constexpr Py_ssize_t places = 4;
constexpr std::array names{"op", "root", "counts", "algorithm", "timeout_s"};

std::size_t number_of(PyObject* name) {
  static const std::array<PyObject*, names.size()> interned = [] {
    std::array<PyObject*, names.size()> result{};
    std::transform(names.begin(), names.end(), result.begin(), PyUnicode_InternFromString);
    return result;
  }();
  for (std::size_t i = 0; i < interned.size(); ++i)
    if (interned[i] == name) return i;
  for (std::size_t i = 0; i < interned.size(); ++i)
    if (PyUnicode_Compare(interned[i], name) == 0) return i;
  throw nb::type_error("add has no argument of this name");
}

// Uses Python's own calling convention, as CallCache.run does.
PyObject* add_from_python(PyObject* self, PyObject* const* args, Py_ssize_t count, PyObject* keyword_names) {
  return or_error(static_cast<PyObject*>(nullptr), [&] {
    if (count != places) throw nb::type_error("add takes collective, x, out and target, and the others by their names");
    std::array<nb::handle, names.size()> keywords;
    keywords.fill(Py_None);
    const Py_ssize_t more = keyword_names == nullptr ? 0 : PyTuple_GET_SIZE(keyword_names);
    for (Py_ssize_t i = 0; i < more; ++i) keywords[number_of(PyTuple_GET_ITEM(keyword_names, i))] = args[places + i];
    const auto& [op, root, counts, algorithm, timeout_s] = keywords;
    auto* recorder = nb::inst_ptr<GroupRecorder>(self);
    return recorder->add({args[0], args[1], args[2], args[3], op, root, counts, algorithm, timeout_s}).release().ptr();
  });
}

PyObject* always_miss(PyObject*, PyObject* const*, Py_ssize_t) { Py_RETURN_FALSE; }

PyTypeObject* group_recorder_type = nullptr;

}  // namespace

bool is_group_recorder(PyObject* cache) { return Py_TYPE(cache) == group_recorder_type; }

PyObject* record_call(PyObject* recorder, PyObject* const* args) {
  return or_error(static_cast<PyObject*>(nullptr), [&] {
    const nb::handle none = Py_None;
    return nb::inst_ptr<GroupRecorder>(recorder)
        ->add({args[0], args[1], args[2], args[2], args[3], args[4], none, args[5], args[6]})
        .release()
        .ptr();
  });
}

void bind_group_recorder(nb::module_& module) {
  static PyMethodDef methods[] = {
      {"add", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(add_from_python)),
       METH_FASTCALL | METH_KEYWORDS, nullptr},
      {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(always_miss)), METH_FASTCALL, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_methods, methods}, {0, nullptr}};
  nb::class_<GroupRecorder>(module, "GroupRecorder", nb::type_slots(slots))
      .def(nb::init<nb::object, nb::object>(), nb::arg("open"), nb::arg("work_type"))
      .def("start", [](GroupRecorder&, nb::args) { return nb::none(); })
      .def("contains", [](GroupRecorder&, nb::args) { return false; })
      .def("forget", [](GroupRecorder&) {});
  group_recorder_type = reinterpret_cast<PyTypeObject*>(module.attr("GroupRecorder").ptr());
}

}  // namespace unisono
