#include "bindings/arguments.h"

#include <cstring>

namespace flashckpt {
namespace {

void raise_os(const Error& error) {
    nb::object path = nb::none();
    if (!error.path.empty()) {
        path = nb::steal(PyUnicode_DecodeFSDefaultAndSize(error.path.data(), Py_ssize_t(error.path.size())));
        if (!path.is_valid()) throw nb::python_error();
    }
    // Call the class: OSError then returns FileExistsError and other subclasses by errno.
    nb::object raised =
        nb::steal(PyObject_CallFunction(PyExc_OSError, "isO", error.code, error.message.c_str(), path.ptr()));
    if (raised.is_valid()) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(raised.ptr())), raised.ptr());
    throw nb::python_error();
}

} // namespace

void raise_if(const Error& error) {
    switch (error.kind) {
    case Kind::none:
        return;
    case Kind::os:
        raise_os(error);
        break;
    case Kind::value:
        raise_value(error.message.c_str());
    case Kind::device:
        PyErr_SetString(PyExc_RuntimeError, error.message.c_str());
        throw nb::python_error();
    }
}

void raise_value(const char* message) {
    PyErr_SetString(PyExc_ValueError, message);
    throw nb::python_error();
}

BytesView::BytesView(nb::handle object, int flags) {
    if (into_python([&] { return PyObject_GetBuffer(object.ptr(), &view_, flags); }) != 0)
        throw nb::python_error();
}

U64View::U64View(nb::handle object, bool writable)
    : BytesView(object, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0)) {
    const char* format = view_.format != nullptr ? view_.format : "B";
    if (*format == '@' || *format == '=' || *format == '<') ++format;
    bool integers = *format != '\0' && std::strchr("QqLlNn", *format) != nullptr && format[1] == '\0';
    if (view_.itemsize == 8 && integers) return;
    into_python([this] { PyBuffer_Release(&view_); });
    PyErr_SetString(PyExc_TypeError, "a buffer of 8-byte integers is needed, such as array('Q')");
    throw nb::python_error();
}

std::string path_of(nb::handle object) {
    PyObject* encoded = nullptr;
    if (into_python([&] { return PyUnicode_FSConverter(object.ptr(), &encoded); }) == 0)
        throw nb::python_error();
    Held owner = Held::steal(encoded);
    return {PyBytes_AS_STRING(encoded), static_cast<std::size_t>(PyBytes_GET_SIZE(encoded))};
}

std::uint64_t* u64_pointer(std::uint64_t address) {
    if (address == 0 || address % 8 != 0)
        raise_value("no u64 can be at this address: it must be a multiple of 8");
    return reinterpret_cast<std::uint64_t*>(address);
}

nb::bytes bytes_of(const void* data, std::size_t num_bytes) {
    return nb::bytes(data, num_bytes);
}

} // namespace flashckpt
