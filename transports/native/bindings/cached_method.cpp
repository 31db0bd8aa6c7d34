// Methods in front of which stands what can do without them: the cache of known calls, or what passes plain messages
// on.
//
// Theory of operation. A collective is a method in Python, which checks, plans and explains. `CachedMethod` takes its
// place in the class: it puts the arguments of a call where the cache of the communicator expects them, and if the
// cache knows the call and has run it, that was all, without a frame of Python. Everything else is left to the method:
// calls that are not known or not to be waited for, options and results that the cache does not know of, wrong
// arguments. The cache is one of the `__slots__` of the class, for it takes a tenth of a call to look an attribute up
// by its name.
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

// What is asked first: the slot of the communicator that it is in, where it expects the parameters of a method, by
// their names, after the name of the method itself, and how it is asked. Parameters that are not here must be as by
// default.
struct Cache {
  const char* slot;
  std::array<const char*, known_call_arguments> places;
  Known (*run)(PyObject* cache, PyObject* const* arguments);
};
constexpr Cache caches[] = {
    {"_cache", {"", "x", "out", "op", "root", "algorithm", "timeout_s"}, run_known},
    {"_messages", {"", "x", "out", "dest", "source", "tag", "timeout_s"}, run_message},
};
constexpr std::size_t out_index = 2;
constexpr std::size_t no_place = known_call_arguments;
constexpr std::size_t most_parameters = 12;

struct Parameter {
  PyObject* name;          // interned
  PyObject* if_not_given;  // nullptr: it must be given
  std::size_t index;       // among the arguments of the cache, or `no_place`
};

struct CachedMethod {
  PyObject_HEAD;
  vectorcallfunc call;
  const Cache* cache;
  PyTypeObject* owner;    // of the slot; nullptr before the method is part of a class
  Py_ssize_t slot_place;  // in an object
  PyObject* method;
  Py_ssize_t parameters;
  Py_ssize_t positional;
  bool returns_out;
  // What the cache is asked for, the collective first; nullptr: it must be given.
  PyObject* if_not_given[known_call_arguments];
  Parameter parameter[most_parameters];

  const Parameter* find(PyObject* name) const {
    for (Py_ssize_t i = 0; i < parameters; ++i)
      if (parameter[i].name == name) return &parameter[i];
    return nullptr;
  }
  // The cache of a communicator; nullptr if this is none.
  PyObject* cache_of(PyObject* communicator) const {
    if (owner == nullptr || !PyObject_TypeCheck(communicator, owner)) return nullptr;
    return *reinterpret_cast<PyObject**>(reinterpret_cast<std::byte*>(communicator) + slot_place);
  }
};

// Puts an argument where the cache expects it; false if the cache knows of no such argument.
bool take(const Parameter& parameter, PyObject* given, PyObject** arguments) {
  if (parameter.index == no_place) return given == parameter.if_not_given;
  arguments[parameter.index] = given;
  return true;
}

bool take_all(const CachedMethod& self, PyObject* const* given, Py_ssize_t count, PyObject* names,
              PyObject** arguments) {
  std::copy_n(self.if_not_given, known_call_arguments, arguments);
  if (count > self.positional) return false;
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!take(self.parameter[i], given[i], arguments)) return false;
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    const Parameter* parameter = self.find(PyTuple_GET_ITEM(names, i));
    if (parameter == nullptr || !take(*parameter, given[count + i], arguments)) return false;
  }
  // An `out` that the method would have to make is none that the cache could have been asked for.
  return std::find(arguments, arguments + known_call_arguments, nullptr) == arguments + known_call_arguments &&
         !(self.returns_out && arguments[out_index] == Py_None);
}

PyObject* call(PyObject* object, PyObject* const* given, std::size_t flagged_count, PyObject* names) {
  const auto& self = *reinterpret_cast<CachedMethod*>(object);
  const Py_ssize_t count = PyVectorcall_NARGS(flagged_count);
  PyObject* arguments[known_call_arguments];
  if (count > 0 && take_all(self, given + 1, count - 1, names, arguments)) {
    const nb::object cache = nb::borrow(self.cache_of(given[0]));
    if (cache && takes_notes(cache.ptr())) return note(cache.ptr(), arguments);
    const Known known = cache ? self.cache->run(cache.ptr(), arguments) : Known::no;
    if (known == Known::failed) return nullptr;
    if (known == Known::yes) return Py_NewRef(self.returns_out ? arguments[out_index] : Py_None);
  }
  return PyObject_Vectorcall(self.method, given, flagged_count, names);
}

void add_parameter(CachedMethod& self, nb::handle parameter) {
  if (self.parameters == most_parameters) throw nb::type_error("a method with that many parameters");
  const auto name = nb::cast<std::string>(nb::object(parameter.attr("name")));
  const nb::object by_default = parameter.attr("default");
  const bool needed = by_default.is(parameter.attr("empty"));
  Parameter& added = self.parameter[self.parameters++];
  added = {PyUnicode_InternFromString(name.c_str()), needed ? nullptr : nb::object(by_default).release().ptr(),
           no_place};
  const auto& known = self.cache->places;
  const auto place = std::find(known.begin(), known.end(), name);
  if (place != known.end()) added.index = static_cast<std::size_t>(place - known.begin());
  const nb::object kind = parameter.attr("kind");
  if (!kind.equal(parameter.attr("KEYWORD_ONLY"))) self.positional = self.parameters;
}

void describe(CachedMethod& self) {
  const nb::handle method = self.method;
  const nb::object signature = nb::module_::import_("inspect").attr("signature")(method);
  bool is_self = true;
  for (nb::handle parameter : signature.attr("parameters").attr("values")())
    if (!std::exchange(is_self, false)) add_parameter(self, parameter);
  std::fill_n(self.if_not_given + 1, known_call_arguments - 1, Py_None);
  self.if_not_given[0] = nb::object(method.attr("__name__")).release().ptr();
  for (Py_ssize_t i = 0; i < self.parameters; ++i)
    if (self.parameter[i].index != no_place)
      self.if_not_given[self.parameter[i].index] = self.parameter[i].if_not_given;
  self.returns_out = self.find(nb::steal(PyUnicode_InternFromString("out")).ptr()) != nullptr;
}

const Cache* find_cache(std::string_view slot) {
  const auto found =
      std::find_if(std::begin(caches), std::end(caches), [&](const Cache& each) { return each.slot == slot; });
  if (found == std::end(caches)) throw nb::value_error("there is no such cache");
  return found;
}

PyObject* make(PyTypeObject* type, PyObject* given, PyObject* named) {
  static const char* names[] = {"method", "cache", nullptr};
  PyObject* method = nullptr;
  const char* cache = caches[0].slot;
  if (!PyArg_ParseTupleAndKeywords(given, named, "O|s:CachedMethod", const_cast<char**>(names), &method, &cache))
    return nullptr;
  return or_error(static_cast<PyObject*>(nullptr), [&] {
    nb::object made = nb::steal(type->tp_alloc(type, 0));
    if (!made) throw nb::python_error();
    auto& self = *reinterpret_cast<CachedMethod*>(made.ptr());
    self.call = call;
    self.cache = find_cache(cache);
    self.method = Py_NewRef(method);
    describe(self);
    return made.release().ptr();
  });
}

void destroy(PyObject* object) {
  auto& self = *reinterpret_cast<CachedMethod*>(object);
  for (Py_ssize_t i = 0; i < self.parameters; ++i) {
    Py_XDECREF(self.parameter[i].name);
    Py_XDECREF(self.parameter[i].if_not_given);
  }
  Py_XDECREF(self.owner);
  Py_XDECREF(self.method);
  Py_XDECREF(self.if_not_given[0]);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

// `__set_name__`: the method has become part of a class, by which its slot is found.
PyObject* join(PyObject* object, PyObject* const* given, Py_ssize_t count) {
  if (count != 2) return PyErr_Format(PyExc_TypeError, "__set_name__ takes a class and a name");
  auto& self = *reinterpret_cast<CachedMethod*>(object);
  PyObject* found = PyObject_GetAttrString(given[0], self.cache->slot);
  if (found == nullptr) return nullptr;
  const nb::object slot = nb::steal(found);
  if (!Py_IS_TYPE(found, &PyMemberDescr_Type))
    return PyErr_Format(PyExc_TypeError, "%s must be one of __slots__", self.cache->slot);
  PyTypeObject* owner = self.owner;
  self.slot_place = reinterpret_cast<PyMemberDescrObject*>(found)->d_member->offset;
  self.owner = reinterpret_cast<PyTypeObject*>(Py_NewRef(PyDescr_TYPE(found)));
  Py_XDECREF(owner);
  Py_RETURN_NONE;
}

PyObject* bind(PyObject* object, PyObject* instance, PyObject*) {
  return instance == nullptr ? Py_NewRef(object) : PyMethod_New(object, instance);
}

// `help` and `pydoc` read `__doc__` past `tp_getattro`, so the type needs a descriptor for it.
PyObject* documentation(PyObject* object, void*) {
  return PyObject_GetAttrString(reinterpret_cast<CachedMethod*>(object)->method, "__doc__");
}

// Name, module, annotations and all other attributes are those of the method.
PyObject* get(PyObject* object, PyObject* name) {
  auto& self = *reinterpret_cast<CachedMethod*>(object);
  if (PyUnicode_CompareWithASCIIString(name, "__wrapped__") == 0) return Py_NewRef(self.method);
  if (PyUnicode_CompareWithASCIIString(name, "__class__") == 0) return PyObject_GenericGetAttr(object, name);
  return PyObject_GetAttr(self.method, name);
}

}  // namespace

void bind_known_first(nb::module_& module) {
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
  // Python looks up methods quickly only if their type cannot change.
  constexpr unsigned flags =
      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_METHOD_DESCRIPTOR | Py_TPFLAGS_HAVE_VECTORCALL;
  static PyType_Spec spec{"unisono.transports._core.CachedMethod", sizeof(CachedMethod), 0, flags, slots};
  module.attr("CachedMethod") = nb::steal(PyType_FromSpec(&spec));
}

}  // namespace unisono
