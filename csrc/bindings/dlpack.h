// The part of DLPack 1.x that reads where a tensor is, declared here so that nothing of torch is needed to
// build. Layouts are fixed by DLPack's ABI: https://dmlc.github.io/dlpack/latest/c_api.html
#pragma once

#include <cstdint>

namespace flashckpt::dlpack {

struct Version {
    std::uint32_t major;
    std::uint32_t minor;
};

struct Device {
    std::int32_t type;
    std::int32_t id;
};

struct DataType {
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
};

struct Tensor {
    void* data;
    Device device;
    std::int32_t ndim;
    DataType dtype;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
};

// What `torch.Tensor.__dlpack_c_exchange_api__` points to, a capsule of the name below.
struct ExchangeApi {
    Version version;
    ExchangeApi* older;
    void* allocate;
    void* from_object;
    void* to_object;
    // Fills a view without owning it; -1 and a Python error where the tensor cannot be described.
    int (*view_of_object)(void* object, Tensor* out);
    void* current_stream;
};

constexpr const char* kCapsule = "dlpack_exchange_api";
constexpr const char* kAttribute = "__dlpack_c_exchange_api__";
constexpr std::uint32_t kMajor = 1;

} // namespace flashckpt::dlpack
