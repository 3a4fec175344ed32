// The used calls of the CUDA driver, loaded at run time, so that neither the build nor a machine needs CUDA.
// Versioned names, as the headers of CUDA 12 and 13 map them.
#pragma once

#include "base/error.h"

#include <cstddef>
#include <cstdint>
#include <string>

namespace flashckpt {

using CuResult = int;
using CuDevice = int;
using CuContext = void*;
using CuStream = void*;
using CuEvent = void*;
using CuModule = void*;
using CuFunction = void*;

constexpr CuResult kCuSuccess = 0;
constexpr unsigned kCuRegisterPortable = 1;
constexpr int kCuCaptureRelaxed = 2;
constexpr CuResult kCuCaptureImplicit = 906; // the legacy stream was used while another stream is captured
constexpr unsigned kCuStreamNonBlocking = 1;
constexpr unsigned kCuEventBlockingSync = 1;
constexpr unsigned kCuEventNoTiming = 2;
constexpr int kCuMultiprocessors = 16; // an attribute of a device
constexpr int kCuPciBus = 33;
constexpr int kCuPciDevice = 34;
constexpr int kCuPciDomain = 50;
constexpr int kCuJitErrorLog = 5;      // options of a load: a buffer of text
constexpr int kCuJitErrorLogBytes = 6; // and its size

struct Driver {
    CuResult (*init)(unsigned flags);
    CuResult (*device_count)(int* count);
    CuResult (*device_get)(CuDevice* device, int ordinal);
    CuResult (*primary_retain)(CuContext* context, CuDevice device);
    CuResult (*context_set)(CuContext context);
    CuResult (*context_get)(CuContext* context);
    CuResult (*host_register)(void* address, std::size_t num_bytes, unsigned flags);
    CuResult (*host_unregister)(void* address);
    CuResult (*copy_to_host)(void* host, std::uint64_t device_address, std::size_t num_bytes,
                             CuStream stream);
    CuResult (*exchange_capture_mode)(int* mode);
    CuResult (*event_create)(CuEvent* event, unsigned flags);
    CuResult (*event_record)(CuEvent event, CuStream stream);
    CuResult (*event_synchronize)(CuEvent event);
    CuResult (*event_elapsed)(float* milliseconds, CuEvent start, CuEvent end);
    CuResult (*stream_wait_event)(CuStream stream, CuEvent event, unsigned flags);
    CuResult (*stream_create)(CuStream* stream, unsigned flags);
    CuResult (*stream_synchronize)(CuStream stream);
    CuResult (*stream_capturing)(CuStream stream, int* status);
    CuResult (*stream_destroy)(CuStream stream);
    CuResult (*memory_take)(std::uint64_t* address, std::size_t num_bytes);
    CuResult (*memory_free)(std::uint64_t address);
    CuResult (*copy_to_device)(std::uint64_t device_address, const void* host, std::size_t num_bytes,
                               CuStream stream);
    CuResult (*device_attribute)(int* value, int attribute, CuDevice device);
    CuResult (*module_load)(CuModule* module, const void* image, unsigned num_options, int* options,
                            void** values);
    CuResult (*module_function)(CuFunction* function, CuModule module, const char* name);
    CuResult (*occupancy)(int* num_blocks, CuFunction function, int block_threads, std::size_t shared_bytes);
    CuResult (*launch)(CuFunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                       unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared_bytes,
                       CuStream stream, void** parameters, void** extra);
    CuResult (*fill)(std::uint64_t address, unsigned char byte, std::size_t num_bytes, CuStream stream);
    CuResult (*error_name)(CuResult code, const char** name);
    CuResult (*error_text)(CuResult code, const char** text);

    // Loaded and initialised once, at the first call; null, with the reason, if there is no usable driver.
    static const Driver* get(std::string& why);

    Error failure(CuResult code, const std::string& what) const;
};

} // namespace flashckpt
