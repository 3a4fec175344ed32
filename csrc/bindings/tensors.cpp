#include "bindings/tensors.h"

#include <cstring>

namespace flashckpt {
namespace {

// Null where this torch, or this type, has no such interface. Static in its library: it outlives us.
const dlpack::ExchangeApi* api_of(nb::handle tensor) {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
    nb::object capsule = nb::steal(PyObject_GetAttrString(type, dlpack::kAttribute));
    const void* found = nullptr;
    if (capsule.is_valid() && PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsule)) {
        found = PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule);
    }
    PyErr_Clear();
    const auto* api = static_cast<const dlpack::ExchangeApi*>(found);
    while (api != nullptr && api->version.major != dlpack::kMajor)
        api = api->older;
    return api != nullptr && api->view_of_object != nullptr ? api : nullptr;
}

bool view_of(const dlpack::ExchangeApi& api, nb::handle tensor, dlpack::Tensor& view) {
    if (api.view_of_object(tensor.ptr(), &view) == 0) return true;
    PyErr_Clear();
    return false;
}

std::uint64_t address_of(const dlpack::Tensor& view) {
    return view.data == nullptr ? 0 : reinterpret_cast<std::uint64_t>(view.data) + view.byte_offset;
}

nb::object call(nb::handle object, PyObject* name) {
    nb::object result = nb::steal(PyObject_CallMethodNoArgs(object.ptr(), name));
    if (!result.is_valid()) PyErr_Clear();
    return result;
}

nb::object attribute(nb::handle object, PyObject* name) {
    nb::object result = nb::steal(PyObject_GetAttr(object.ptr(), name));
    if (!result.is_valid()) PyErr_Clear();
    return result;
}

PyObject* interned(const char* text) {
    return PyUnicode_InternFromString(text); // kept for good
}

std::uint64_t pointer_of(nb::handle tensor) {
    static PyObject* const data_ptr = interned("data_ptr");
    nb::object result = call(tensor, data_ptr);
    if (!result.is_valid()) return 0;
    unsigned long long address = PyLong_AsUnsignedLongLong(result.ptr());
    if (PyErr_Occurred() == nullptr) return address;
    PyErr_Clear();
    return 0;
}

nb::object facts_of(nb::handle tensor) {
    static PyObject* const shape = interned("shape");
    static PyObject* const stride = interned("stride");
    static PyObject* const dtype = interned("dtype");
    nb::object sizes = attribute(tensor, shape);
    nb::object strides = call(tensor, stride);
    nb::object type = attribute(tensor, dtype);
    if (!sizes.is_valid() || !strides.is_valid() || !type.is_valid()) return {};
    return nb::steal(PyTuple_Pack(3, sizes.ptr(), strides.ptr(), type.ptr()));
}

} // namespace

Look Look::at(nb::handle tensor) {
    Look look;
    look.api_ = api_of(tensor);
    if (look.api_ == nullptr || !look.take_view(tensor)) {
        look.api_ = nullptr;
        look.take_facts(tensor);
    }
    return look;
}

bool Look::take_view(nb::handle tensor) {
    dlpack::Tensor view{};
    if (!view_of(*api_, tensor, view)) return false;
    address_ = flashckpt::address_of(view);
    dtype_ = view.dtype;
    record_at_ = reinterpret_cast<std::uintptr_t>(view.shape);
    extents_.assign(view.shape, view.shape + view.ndim);
    if (view.strides != nullptr) extents_.insert(extents_.end(), view.strides, view.strides + view.ndim);
    return true;
}

void Look::take_facts(nb::handle tensor) {
    address_ = pointer_of(tensor);
    facts_ = facts_of(tensor);
}

bool Look::holds(nb::handle tensor, std::uint64_t& address) const {
    if (api_ == nullptr) {
        address = pointer_of(tensor);
        nb::object facts = facts_of(tensor);
        if (facts.is_valid() != facts_.is_valid()) return false;
        if (!facts.is_valid()) return address == address_;
        int equal = PyObject_RichCompareBool(facts.ptr(), facts_.ptr(), Py_EQ);
        if (equal < 0) PyErr_Clear();
        return equal == 1 && address == address_;
    }
    dlpack::Tensor view{};
    if (!view_of(*api_, tensor, view)) {
        address = pointer_of(tensor);
        return false;
    }
    address = flashckpt::address_of(view);
    std::size_t bytes = static_cast<std::size_t>(view.ndim) * sizeof(std::int64_t);
    std::size_t rows = view.strides != nullptr ? 2 : 1;
    if (address != address_ || extents_.size() != rows * static_cast<std::size_t>(view.ndim)) return false;
    if (std::memcmp(&view.dtype, &dtype_, sizeof(dtype_)) != 0) return false;
    if (bytes == 0) return true;
    if (std::memcmp(view.shape, extents_.data(), bytes) != 0) return false;
    return rows == 1 || std::memcmp(view.strides, extents_.data() + view.ndim, bytes) == 0;
}

} // namespace flashckpt
