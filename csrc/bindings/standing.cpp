// Standing: checks at every boundary whether containers have the same length and the same objects as when the
// state was walked.
#include "bindings/places.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

namespace flashckpt {
namespace {

Held fast(nb::handle sequence, const char* message) {
    Held result = Held::steal(into_python([&] { return PySequence_Fast(sequence.ptr(), message); }));
    if (!result) throw nb::python_error();
    return result;
}

Held part_of(const Held& sequence, Py_ssize_t index, Py_ssize_t count, const char* message) {
    Held part = Held::borrow(PySequence_Fast_GET_ITEM(sequence.ptr(), index));
    if (!PyTuple_Check(part.ptr()) || PyTuple_GET_SIZE(part.ptr()) != count) raise_value(message);
    return part;
}

struct Guard {
    Held container;
    Py_ssize_t length;
};

struct Anchor {
    Place place;
    Held value;
    std::size_t dict; // number of the dict if it is iterated, kNotThrough for other places
};

constexpr std::size_t kNotThrough = static_cast<std::size_t>(-1);

// Finds the value of a key at or after a position of a dict, and advances the position past it. Borrowed
// references are only compared, never used: calls since may have changed the dict.
PyObject* next_of(const Place& place, Py_ssize_t& position) {
    PyObject* key = nullptr;
    PyObject* value = nullptr;
    while (PyDict_Next(place.container().ptr(), &position, &key, &value) != 0)
        if (key == place.key().ptr()) return value;
    return nullptr;
}

// Immutable: the calls of `stands` may run any code, also this object's methods.
class Standing {
  public:
    Standing(nb::handle guards, nb::handle anchors);
    Standing(const Standing&) = delete;
    Standing& operator=(const Standing&) = delete;

    bool stands() const;

    int traverse(visitproc visit, void* arg) const {
        for (const Guard& guard : guards_)
            Py_VISIT(guard.container.ptr());
        for (const Anchor& anchor : anchors_) {
            Py_VISIT(anchor.value.ptr());
            if (int result = anchor.place.traverse(visit, arg); result != 0) return result;
        }
        return 0;
    }

  private:
    bool holds(const Anchor& anchor, std::vector<Py_ssize_t>& positions) const;

    std::vector<Guard> guards_;
    std::vector<Anchor> anchors_;
    std::size_t dicts_ = 0;
};

Standing::Standing(nb::handle guards, nb::handle anchors) {
    Held pairs = fast(guards, "guards must be a list of (container, length)");
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(pairs.ptr()); ++i) {
        Held pair = part_of(pairs, i, 2, "a guard must be (container, length)");
        PyObject* number = PyTuple_GET_ITEM(pair.ptr(), 1);
        Py_ssize_t length = into_python([=] { return PyLong_AsSsize_t(number); });
        if (length == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
        guards_.push_back({Held::borrow(PyTuple_GET_ITEM(pair.ptr(), 0)), length});
    }
    Held triples = fast(anchors, "anchors must be a list of (container, key, object)");
    std::unordered_map<PyObject*, std::size_t> numbers;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(triples.ptr()); ++i) {
        Held triple = part_of(triples, i, 3, "an anchor must be (container, key, object)");
        nb::handle container = PyTuple_GET_ITEM(triple.ptr(), 0);
        nb::handle key = PyTuple_GET_ITEM(triple.ptr(), 1);
        Place place = Place::asked(container, key);
        // The keys of an optimizer's state are parameters, whose hash is a Python call, so such a dict is
        // iterated once, in order. The hash of a str is cached.
        bool through = place.access() == Access::dict && !PyUnicode_Check(key.ptr());
        std::size_t dict =
            through ? numbers.try_emplace(container.ptr(), numbers.size()).first->second : kNotThrough;
        anchors_.push_back({std::move(place), Held::borrow(PyTuple_GET_ITEM(triple.ptr(), 2)), dict});
    }
    dicts_ = numbers.size();
}

// The current object; not valid if the item is absent. Throws all errors except those of an absent item.
Held found_at(const Place& place) {
    Held found = place.current();
    if (found || PyErr_Occurred() == nullptr) return found;
    if (PyErr_ExceptionMatches(PyExc_LookupError) == 0 && PyErr_ExceptionMatches(PyExc_AttributeError) == 0)
        throw nb::python_error();
    PyErr_Clear();
    return found;
}

bool Standing::holds(const Anchor& anchor, std::vector<Py_ssize_t>& positions) const {
    PyObject* met = anchor.dict == kNotThrough ? nullptr : next_of(anchor.place, positions[anchor.dict]);
    return met != nullptr ? met == anchor.value.ptr() : found_at(anchor.place).ptr() == anchor.value.ptr();
}

bool Standing::stands() const {
    for (const Guard& guard : guards_) {
        Py_ssize_t length = into_python([&] { return PyObject_Size(guard.container.ptr()); });
        if (length == -1 && PyErr_Occurred() != nullptr) throw nb::python_error();
        if (length != guard.length) return false;
    }
    std::vector<Py_ssize_t> positions(dicts_, 0);
    return std::all_of(anchors_.begin(), anchors_.end(),
                       [&](const Anchor& anchor) { return holds(anchor, positions); });
}

int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<Standing>(self)->traverse(visit, arg) : 0;
}

// Like a tuple it needs no tp_clear: it only refers to older objects, so another object closes any cycle.
PyType_Slot slots[] = {
    {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
    {0, nullptr},
};

} // namespace

void bind_standing(nb::module_& module) {
    nb::class_<Standing>(module, "Standing", nb::type_slots(slots))
        .def(nb::init<nb::handle, nb::handle>(), nb::arg("guards"), nb::arg("anchors"))
        .def("stands", &Standing::stands);
}

} // namespace flashckpt
