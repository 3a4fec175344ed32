#include "bindings/tensors.h"

#include <cstring>
#include <dlfcn.h>

namespace flashckpt {
namespace {

// Null if this torch or this type has no such interface. The table is static in torch's library.
const dlpack::ExchangeApi* api_of(nb::handle tensor) {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
    Held capsule = Held::steal(into_python([=] { return PyObject_GetAttrString(type, dlpack::kAttribute); }));
    const void* found = nullptr;
    if (capsule && PyCapsule_IsValid(capsule.ptr(), dlpack::kCapsule)) {
        found = PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsule);
    }
    forgive();
    const auto* api = static_cast<const dlpack::ExchangeApi*>(found);
    while (api != nullptr && api->version.major != dlpack::kMajor)
        api = api->older;
    return api != nullptr && api->view_of_object != nullptr ? api : nullptr;
}

bool view_of(const dlpack::ExchangeApi& api, nb::handle tensor, dlpack::Tensor& view) {
    if (into_python([&] { return api.view_of_object(tensor.ptr(), &view); }) == 0) return true;
    forgive();
    return false;
}

std::uint64_t address_of(const dlpack::Tensor& view) {
    return view.data == nullptr ? 0 : reinterpret_cast<std::uint64_t>(view.data) + view.byte_offset;
}

Held call(nb::handle object, PyObject* name) {
    Held result = Held::steal(into_python([=] { return PyObject_CallMethodNoArgs(object.ptr(), name); }));
    if (!result) forgive();
    return result;
}

Held attribute(nb::handle object, PyObject* name) {
    Held result = Held::steal(into_python([=] { return PyObject_GetAttr(object.ptr(), name); }));
    if (!result) forgive();
    return result;
}

PyObject* interned(const char* text) {
    return PyUnicode_InternFromString(text); // never released
}

// Converts to 64 bits; 0 for anything else.
std::uint64_t number_in(const Held& object) {
    if (PyLong_Check(object.ptr()) == 0) return 0;
    unsigned long long number = PyLong_AsUnsignedLongLong(object.ptr());
    if (PyErr_Occurred() == nullptr) return number;
    forgive();
    return 0;
}

// Calls a method without arguments.
std::uint64_t number_of(nb::handle object, PyObject* name) {
    Held result = call(object, name);
    return result ? number_in(result) : 0;
}

std::uint64_t pointer_of(nb::handle tensor) {
    static PyObject* const data_ptr = interned("data_ptr");
    return number_of(tensor, data_ptr);
}

std::uint64_t storage_bytes_of(nb::handle tensor) {
    static PyObject* const untyped_storage = interned("untyped_storage");
    static PyObject* const nbytes = interned("nbytes");
    Held storage = call(tensor, untyped_storage);
    return storage ? number_of(storage.ptr(), nbytes) : 0;
}

// A function of torch's stable C ABI for compiled models: takes the address of a pointer to a tensor's
// record, and returns the bytes of its storage. Null if torch lacks it. Its library is loaded whenever a
// tensor exists, and stays loaded.
using StorageBytes = std::int32_t (*)(const void* tensor, std::int64_t* num_bytes);
// Minimum size of a tensor's record: addresses this close to its start are inside of it.
constexpr std::uintptr_t kRecordBytes = 128;

StorageBytes find_storage_bytes() {
    void* library = ::dlopen("libtorch_cpu.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return nullptr;
    return reinterpret_cast<StorageBytes>(::dlsym(library, "aoti_torch_get_storage_size"));
}

std::uint64_t storage_bytes_at(std::uintptr_t record) {
    static const StorageBytes ask = find_storage_bytes();
    std::int64_t num_bytes = 0;
    return ask != nullptr && ask(&record, &num_bytes) == 0 ? static_cast<std::uint64_t>(num_bytes) : 0;
}

Held facts_of(nb::handle tensor) {
    static PyObject* const shape = interned("shape");
    static PyObject* const stride = interned("stride");
    static PyObject* const dtype = interned("dtype");
    Held sizes = attribute(tensor, shape);
    Held strides = call(tensor, stride);
    Held type = attribute(tensor, dtype);
    if (!sizes || !strides || !type) return {};
    return Held::steal(into_python([&] { return PyTuple_Pack(3, sizes.ptr(), strides.ptr(), type.ptr()); }));
}

} // namespace

Look Look::at(nb::handle tensor) {
    Look look;
    look.api_ = api_of(tensor);
    if (look.api_ == nullptr || !look.take_view(tensor)) {
        look.api_ = nullptr;
        look.take_facts(tensor);
    }
    if (look.address_ != 0) look.storage_bytes_ = storage_bytes_of(tensor);
    if (look.api_ != nullptr && look.storage_bytes_ != 0) look.find_record(tensor);
    return look;
}

void Look::find_record(nb::handle tensor) {
    static PyObject* const cdata = interned("_cdata");
    Held found = attribute(tensor, cdata);
    std::uint64_t record = found ? number_in(found) : 0;
    // Tensors of many dimensions keep their extents outside of the record.
    if (record == 0 || shape_at_ <= record || shape_at_ - record >= kRecordBytes) return;
    if (storage_bytes_at(record) == storage_bytes_) shape_in_record_ = shape_at_ - record;
}

bool Look::take_view(nb::handle tensor) {
    dlpack::Tensor view{};
    if (!view_of(*api_, tensor, view)) return false;
    address_ = flashckpt::address_of(view);
    dtype_ = view.dtype;
    shape_at_ = reinterpret_cast<std::uintptr_t>(view.shape);
    extents_.assign(view.shape, view.shape + view.ndim);
    if (view.strides != nullptr) extents_.insert(extents_.end(), view.strides, view.strides + view.ndim);
    return true;
}

void Look::take_facts(nb::handle tensor) {
    address_ = pointer_of(tensor);
    facts_ = facts_of(tensor);
}

bool Look::holds(nb::handle tensor, std::uint64_t& address) const {
    std::uintptr_t shape_at = 0;
    if (!is_same(tensor, address, shape_at)) return false;
    // Offloaders shrink a storage under its tensors. The checks above see its new address, except if it has
    // grown again at the same address.
    if (storage_bytes_ == 0) return true;
    // The number of dimensions is unchanged, so the extents are at the same offset in the current record,
    // which may be a new one.
    std::uint64_t num_bytes =
        shape_in_record_ != 0 ? storage_bytes_at(shape_at - shape_in_record_) : storage_bytes_of(tensor);
    return num_bytes >= storage_bytes_;
}

bool Look::is_same(nb::handle tensor, std::uint64_t& address, std::uintptr_t& shape_at) const {
    if (api_ == nullptr) {
        address = pointer_of(tensor);
        Held facts = facts_of(tensor);
        if (bool(facts) != bool(facts_)) return false;
        if (!facts) return address == address_;
        int equal = into_python([&] { return PyObject_RichCompareBool(facts.ptr(), facts_.ptr(), Py_EQ); });
        if (equal < 0) forgive();
        return equal == 1 && address == address_;
    }
    dlpack::Tensor view{};
    if (!view_of(*api_, tensor, view)) {
        address = pointer_of(tensor);
        return false;
    }
    address = flashckpt::address_of(view);
    shape_at = reinterpret_cast<std::uintptr_t>(view.shape);
    std::size_t bytes = static_cast<std::size_t>(view.ndim) * sizeof(std::int64_t);
    std::size_t rows = view.strides != nullptr ? 2 : 1;
    if (address != address_ || extents_.size() != rows * static_cast<std::size_t>(view.ndim)) return false;
    if (std::memcmp(&view.dtype, &dtype_, sizeof(dtype_)) != 0) return false;
    if (bytes == 0) return true;
    if (std::memcmp(view.shape, extents_.data(), bytes) != 0) return false;
    return rows == 1 || std::memcmp(view.strides, extents_.data() + view.ndim, bytes) == 0;
}

} // namespace flashckpt
