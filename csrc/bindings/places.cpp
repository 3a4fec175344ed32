#include "bindings/places.h"

namespace flashckpt {
namespace {

Access access_of(nb::handle container, nb::handle key) {
    if (PyDict_Check(container.ptr())) return Access::dict;
    if (PyList_Check(container.ptr()) && PyLong_Check(key.ptr())) return Access::list;
    return PyUnicode_Check(key.ptr()) ? Access::attribute : Access::item;
}

// Whether a subclass overrides item access.
bool overrides_items(nb::handle container, PyTypeObject* base) {
    if (Py_TYPE(container.ptr()) == base) return false;
    auto item_access = [](PyTypeObject* type) {
        Held found = Held::steal(into_python(
            [type] { return PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__getitem__"); }));
        if (!found) throw nb::python_error();
        return found;
    };
    return item_access(Py_TYPE(container.ptr())).ptr() != item_access(base).ptr();
}

} // namespace

Place::Place(nb::handle container, nb::handle key, Access access)
    : container_(Held::borrow(container)), key_(Held::borrow(key)), access_(access) {
    if (access_ != Access::list) return;
    index_ = PyLong_AsSsize_t(key_.ptr());
    if (PyErr_Occurred() != nullptr) throw nb::python_error();
    if (index_ < 0) access_ = Access::item; // relative to the end, which may move
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

Held Place::current() const {
    PyObject* container = container_.ptr();
    PyObject* key = key_.ptr();
    switch (access_) {
    case Access::dict:
        return Held::borrow(into_python([=] { return PyDict_GetItemWithError(container, key); }));
    case Access::list:
        return index_ < PyList_GET_SIZE(container) ? Held::borrow(PyList_GET_ITEM(container, index_))
                                                   : Held();
    case Access::attribute:
        return Held::steal(into_python([=] { return PyObject_GetAttr(container, key); }));
    case Access::item:
        break;
    }
    return Held::steal(into_python([=] { return PyObject_GetItem(container, key); }));
}

} // namespace flashckpt
