#include "bindings/places.h"

namespace flashckpt {
namespace {

Access access_of(nb::handle container, nb::handle key) {
    if (PyDict_Check(container.ptr())) return Access::dict;
    if (PyList_Check(container.ptr()) && PyLong_Check(key.ptr())) return Access::list;
    return PyUnicode_Check(key.ptr()) ? Access::attribute : Access::item;
}

// Whether a subclass has an item access of its own.
bool overrides_items(nb::handle container, PyTypeObject* base) {
    if (Py_TYPE(container.ptr()) == base) return false;
    nb::object own = nb::getattr(container.type(), "__getitem__");
    return !own.is(nb::getattr(nb::handle(reinterpret_cast<PyObject*>(base)), "__getitem__"));
}

} // namespace

Place::Place(nb::handle container, nb::handle key, Access access)
    : container_(nb::borrow(container)), key_(nb::borrow(key)), access_(access) {
    if (access_ != Access::list) return;
    index_ = PyLong_AsSsize_t(key_.ptr());
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    if (index_ < 0) access_ = Access::item; // counted from the end, which moves
}

Place Place::stored(nb::handle container, nb::handle key) {
    return {container, key, access_of(container, key)};
}

Place Place::asked(nb::handle container, nb::handle key) {
    Access access = access_of(container, key);
    if ((access == Access::dict && overrides_items(container, &PyDict_Type)) ||
        (access == Access::list && overrides_items(container, &PyList_Type)))
        access = Access::item;
    return {container, key, access};
}

nb::object Place::current() const {
    PyObject* container = container_.ptr();
    switch (access_) {
    case Access::dict:
        return nb::borrow(PyDict_GetItemWithError(container, key_.ptr()));
    case Access::list:
        return index_ < PyList_GET_SIZE(container) ? nb::borrow(PyList_GET_ITEM(container, index_))
                                                   : nb::object();
    case Access::attribute:
        return nb::steal(PyObject_GetAttr(container, key_.ptr()));
    case Access::item:
        break;
    }
    return nb::steal(PyObject_GetItem(container, key_.ptr()));
}

} // namespace flashckpt
