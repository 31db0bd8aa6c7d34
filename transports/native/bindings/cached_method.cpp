// `CachedMethod` wraps a method of Communicator: it looks the call up in the native cache and runs it there. Only on a
// miss it calls the Python method.
//
// Theory of operation
// -------------------
// A collective is a Python method that checks the arguments, plans the call and explains errors. A `CachedMethod`
// replaces it in the class:
//
//     world.allreduce(x) -> CachedMethod -> native cache -> hit: the core runs the call, with no Python frame
//                                                        -> miss: the Python method
//
// It puts the arguments into the order that the cache expects. It leaves a call to the method in these cases: the cache
// has no such call, the call does not wait (`wait=False`), an option is not part of the cache, or an argument is wrong.
// The cache is one of the `__slots__` of the class, because looking an attribute up by its name takes a tenth of a
// call.
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>

#include "python_call.h"

// After Python.h, which it needs.
#include <structmember.h>

namespace nb = nanobind;

namespace unisono {
namespace {

// A native cache: its slot in the communicator, the names of the parameters that it takes in order (after the method's
// own name), and its function. All other parameters must have their defaults.
struct Cache {
  const char* slot;
  std::array<const char*, cache_arguments> parameters;
  CacheResult (*run)(PyObject* cache, PyObject* const* arguments);
};
constexpr Cache caches[] = {
    {"_cache", {"", "x", "out", "op", "root", "algorithm", "timeout_s"}, run_cached},
    {"_messages", {"", "x", "out", "dest", "source", "tag", "timeout_s"}, run_fast_message},
};
constexpr std::size_t out_index = 2;
constexpr std::size_t not_cached = cache_arguments;
constexpr std::size_t most_parameters = 12;

struct Parameter {
  PyObject* name;           // interned
  PyObject* default_value;  // nullptr: the caller must pass it
  std::size_t index;        // among the arguments of the cache, or `not_cached`
};

struct CachedMethod {
  PyObject_HEAD;
  vectorcallfunc call;
  const Cache* cache;
  PyTypeObject* owner;     // the class with the slot; nullptr before the method is part of a class
  Py_ssize_t slot_offset;  // of the slot in an object
  PyObject* method;
  Py_ssize_t parameters;
  Py_ssize_t positional;
  bool returns_out;
  // The arguments of the cache if the caller omits them, beginning with the method's name; nullptr: required.
  PyObject* default_value[cache_arguments];
  Parameter parameter[most_parameters];

  const Parameter* find(PyObject* name) const {
    for (Py_ssize_t i = 0; i < parameters; ++i)
      if (parameter[i].name == name) return &parameter[i];
    return nullptr;
  }
  // Returns the cache of a communicator; nullptr if the object is no communicator.
  PyObject* cache_of(PyObject* communicator) const {
    if (owner == nullptr || !PyObject_TypeCheck(communicator, owner)) return nullptr;
    return *reinterpret_cast<PyObject**>(reinterpret_cast<std::byte*>(communicator) + slot_offset);
  }
};

// Puts an argument where the cache expects it. False if the parameter is not part of the cache and has not its default.
bool place_argument(const Parameter& parameter, PyObject* argument, PyObject** arguments) {
  if (parameter.index == not_cached) return argument == parameter.default_value;
  arguments[parameter.index] = argument;
  return true;
}

bool place_arguments(const CachedMethod& self, PyObject* const* args, Py_ssize_t count, PyObject* names,
                     PyObject** arguments) {
  std::copy_n(self.default_value, cache_arguments, arguments);
  if (count > self.positional) return false;
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!place_argument(self.parameter[i], args[i], arguments)) return false;
  const Py_ssize_t keywords = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < keywords; ++i) {
    const Parameter* parameter = self.find(PyTuple_GET_ITEM(names, i));
    if (parameter == nullptr || !place_argument(*parameter, args[count + i], arguments)) return false;
  }
  // If the method must create `out`, the cache cannot run the call.
  return std::find(arguments, arguments + cache_arguments, nullptr) == arguments + cache_arguments &&
         !(self.returns_out && arguments[out_index] == Py_None);
}

// Raises TypeError and returns false if a keyword is no parameter. Before version 3.13, Python names no nearest one.
bool check_keywords(const CachedMethod& self, PyObject* names) {
  const Py_ssize_t keywords = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < keywords; ++i) {
    const nb::handle keyword = PyTuple_GET_ITEM(names, i);
    const Parameter* end = self.parameter + self.parameters;
    // Names are compared by value, because a name that the program has computed is no interned string.
    if (std::any_of(self.parameter, end, [&](const Parameter& each) { return keyword.equal(nb::handle(each.name)); }))
      continue;
    return or_error(false, [&] {
      nb::list known;
      for (Py_ssize_t k = 0; k < self.parameters; ++k) known.append(nb::handle(self.parameter[k].name));
      const nb::object hint =
          nb::module_::import_("unisono.foundation.near_names").attr("did_you_mean")(keyword, known);
      PyErr_Format(PyExc_TypeError, "%U() has no argument %R%U", self.default_value[0], keyword.ptr(), hint.ptr());
      return false;
    });
  }
  return true;
}

PyObject* call(PyObject* object, PyObject* const* args, std::size_t flagged_count, PyObject* names) {
  const auto& self = *reinterpret_cast<CachedMethod*>(object);
  const Py_ssize_t count = PyVectorcall_NARGS(flagged_count);
  PyObject* arguments[cache_arguments];
  if (count > 0 && place_arguments(self, args + 1, count - 1, names, arguments)) {
    const nb::object cache = nb::borrow(self.cache_of(args[0]));
    if (cache && is_group_recorder(cache.ptr())) return record_call(cache.ptr(), arguments);
    const CacheResult result = cache ? self.cache->run(cache.ptr(), arguments) : CacheResult::miss;
    if (result == CacheResult::failed) return nullptr;
    if (result == CacheResult::hit) return Py_NewRef(self.returns_out ? arguments[out_index] : Py_None);
  }
  return check_keywords(self, names) ? PyObject_Vectorcall(self.method, args, flagged_count, names) : nullptr;
}

void add_parameter(CachedMethod& self, nb::handle parameter) {
  if (self.parameters == most_parameters) throw nb::type_error("a method with that many parameters");
  const auto name = nb::cast<std::string>(nb::object(parameter.attr("name")));
  const nb::object by_default = parameter.attr("default");
  const bool needed = by_default.is(parameter.attr("empty"));
  Parameter& added = self.parameter[self.parameters++];
  added = {PyUnicode_InternFromString(name.c_str()), needed ? nullptr : nb::object(by_default).release().ptr(),
           not_cached};
  const auto& cached = self.cache->parameters;
  const auto place = std::find(cached.begin(), cached.end(), name);
  if (place != cached.end()) added.index = static_cast<std::size_t>(place - cached.begin());
  const nb::object kind = parameter.attr("kind");
  if (!kind.equal(parameter.attr("KEYWORD_ONLY"))) self.positional = self.parameters;
}

void describe(CachedMethod& self) {
  const nb::handle method = self.method;
  const nb::object signature = nb::module_::import_("inspect").attr("signature")(method);
  bool is_self = true;
  for (nb::handle parameter : signature.attr("parameters").attr("values")())
    if (!std::exchange(is_self, false)) add_parameter(self, parameter);
  std::fill_n(self.default_value + 1, cache_arguments - 1, Py_None);
  self.default_value[0] = nb::object(method.attr("__name__")).release().ptr();
  for (Py_ssize_t i = 0; i < self.parameters; ++i)
    if (self.parameter[i].index != not_cached)
      self.default_value[self.parameter[i].index] = self.parameter[i].default_value;
  self.returns_out = self.find(nb::steal(PyUnicode_InternFromString("out")).ptr()) != nullptr;
}

const Cache* find_cache(std::string_view slot) {
  const auto cache =
      std::find_if(std::begin(caches), std::end(caches), [&](const Cache& each) { return each.slot == slot; });
  if (cache == std::end(caches)) throw nb::value_error("unknown cache");
  return cache;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"method", "cache", nullptr};
  PyObject* method = nullptr;
  const char* cache = caches[0].slot;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|s:CachedMethod", const_cast<char**>(names), &method, &cache))
    return nullptr;
  return or_error(static_cast<PyObject*>(nullptr), [&] {
    nb::object object = nb::steal(type->tp_alloc(type, 0));
    if (!object) throw nb::python_error();
    auto& self = *reinterpret_cast<CachedMethod*>(object.ptr());
    self.call = call;
    self.cache = find_cache(cache);
    self.method = Py_NewRef(method);
    describe(self);
    return object.release().ptr();
  });
}

void destroy(PyObject* object) {
  auto& self = *reinterpret_cast<CachedMethod*>(object);
  for (Py_ssize_t i = 0; i < self.parameters; ++i) {
    Py_XDECREF(self.parameter[i].name);
    Py_XDECREF(self.parameter[i].default_value);
  }
  Py_XDECREF(self.owner);
  Py_XDECREF(self.method);
  Py_XDECREF(self.default_value[0]);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

// `__set_name__`: called when the method becomes part of a class, to find the offset of the slot.
PyObject* join(PyObject* object, PyObject* const* args, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "__set_name__ takes a class and a name");
  auto& self = *reinterpret_cast<CachedMethod*>(object);
  PyObject* descriptor = PyObject_GetAttrString(args[0], self.cache->slot);
  if (descriptor == nullptr) return nullptr;
  const nb::object slot = nb::steal(descriptor);
  if (!Py_IS_TYPE(descriptor, &PyMemberDescr_Type))
    return PyErr_Format(PyExc_TypeError, "%s must be one of __slots__", self.cache->slot);
  PyTypeObject* owner = self.owner;
  self.slot_offset = reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member->offset;
  self.owner = reinterpret_cast<PyTypeObject*>(Py_NewRef(PyDescr_TYPE(descriptor)));
  Py_XDECREF(owner);
  Py_RETURN_NONE;
}

PyObject* bind(PyObject* object, PyObject* instance, PyObject*) {
  return instance == nullptr ? Py_NewRef(object) : PyMethod_New(object, instance);
}

// `help` and `pydoc` read `__doc__` without `tp_getattro`, so the type needs a descriptor for it.
PyObject* documentation(PyObject* object, void*) {
  return PyObject_GetAttrString(reinterpret_cast<CachedMethod*>(object)->method, "__doc__");
}

// All attributes, such as name, module and annotations, are those of the method.
PyObject* get(PyObject* object, PyObject* name) {
  auto& self = *reinterpret_cast<CachedMethod*>(object);
  if (PyUnicode_CompareWithASCIIString(name, "__wrapped__") == 0) return Py_NewRef(self.method);
  if (PyUnicode_CompareWithASCIIString(name, "__class__") == 0) return PyObject_GenericGetAttr(object, name);
  return PyObject_GetAttr(self.method, name);
}

}  // namespace

void bind_cached_method(nb::module_& module) {
  static PyMemberDef members[] = {{"__vectorcalloffset__", T_PYSSIZET, offsetof(CachedMethod, call), READONLY, nullptr},
                                  {}};
  static PyMethodDef methods[] = {
      {"__set_name__", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(join)), METH_FASTCALL, nullptr},
      {nullptr, nullptr, 0, nullptr}};
  static PyGetSetDef computed[] = {{"__doc__", documentation, nullptr, nullptr, nullptr}, {}};
  static PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                                {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
                                {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                {Py_tp_descr_get, reinterpret_cast<void*>(bind)},
                                {Py_tp_getattro, reinterpret_cast<void*>(get)},
                                {Py_tp_members, members},
                                {Py_tp_methods, methods},
                                {Py_tp_getset, computed},
                                {0, nullptr}};
  // Python looks methods up quickly only if their type is immutable.
  constexpr unsigned flags =
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_HAVE_VECTORCALL;
  static PyType_Spec spec{"unisono.transports._core.CachedMethod", sizeof(CachedMethod), 0, flags, slots};
  module.attr("CachedMethod") = nb::steal(PyType_FromSpec(&spec));
}

}  // namespace unisono
