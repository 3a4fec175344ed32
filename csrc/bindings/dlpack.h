// The part of DLPack 1.x that reads a tensor's address and layout, declared here so that the build needs no
// torch. DLPack's ABI fixes the layouts: https://dmlc.github.io/dlpack/latest/c_api.html
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

// Target of `torch.Tensor.__dlpack_c_exchange_api__`, a capsule with the name below.
struct ExchangeApi {
    Version version;
    ExchangeApi* older;
    void* allocate;
    void* from_object;
    void* to_object;
    // Fills a view without owning it; -1 and a Python error if the tensor cannot be described.
    int (*view_of_object)(void* object, Tensor* out);
    void* current_stream;
};

constexpr const char* kCapsule = "dlpack_exchange_api";
constexpr const char* kAttribute = "__dlpack_c_exchange_api__";
constexpr std::uint32_t kMajor = 1;

} // namespace flashckpt::dlpack
