#include "device/cuda_digest.h"

#include "device/context.h"
#include "device/digest_ptx.h"
#include "device/digest_table.h"
#include "device/digest_trial.h"

#include <map>
#include <mutex>
#include <string>

namespace flashckpt {
namespace {

struct Kernel {
    CuFunction function = nullptr;
    unsigned num_blocks = 0; // number that can run concurrently
};

Error load_module(const Driver& driver, CuModule& module) {
    char log[1024] = "";
    int options[] = {kCuJitErrorLog, kCuJitErrorLogBytes};
    void* values[] = {log, reinterpret_cast<void*>(sizeof(log))};
    CuResult code = driver.module_load(&module, kDigestPtx, 2, options, values);
    if (code == kCuSuccess) return {};
    Error error = driver.failure(code, "load the kernel of digests");
    log[sizeof(log) - 1] = '\0';
    if (log[0] != '\0') error.message += std::string(": ") + log;
    return error;
}

Error load_kernel(const Driver& driver, int ordinal, Kernel& out) {
    CuDevice device = 0;
    int processors = 0;
    if (CuResult code = driver.device_get(&device, ordinal)) {
        return driver.failure(code, "find device " + std::to_string(ordinal));
    }
    if (CuResult code = driver.device_attribute(&processors, kCuMultiprocessors, device)) {
        return driver.failure(code, "count the multiprocessors");
    }
    CuModule module = nullptr; // never unloaded, since launches may be queued
    if (Error error = load_module(driver, module)) return error;
    if (CuResult code = driver.module_function(&out.function, module, kDigestKernel)) {
        return driver.failure(code, std::string("find ") + kDigestKernel);
    }
    int at_once = 0;
    if (CuResult code = driver.occupancy(&at_once, out.function, kDigestThreads, 0)) {
        return driver.failure(code, "tell how many blocks of the digest kernel run at once");
    }
    if (at_once < 1 || processors < 1) {
        return {Kind::device, 0, "no block of the digest kernel fits on this device", ""};
    }
    out.num_blocks = static_cast<unsigned>(at_once) * static_cast<unsigned>(processors);
    return {};
}

Error fill(const Driver& driver, std::uint64_t address, unsigned char byte, std::size_t num_bytes,
           CuStream stream) {
    CuResult code = driver.fill(address, byte, num_bytes, stream);
    return code == kCuSuccess ? Error{} : driver.failure(code, "prepare the table of digests");
}

// Queues a launch. The thread must be in the device's context.
Error enqueue(const Driver& driver, const Kernel& kernel, CuStream stream, std::uint64_t table,
              std::size_t num_leaves, std::uint64_t digests) {
    // Clear the digests first, so that a later failure leaves no older digest that could be taken for a
    // result.
    static_assert(kEmptyDigest == ~0ull);
    if (Error error = fill(driver, digests, 0xFF, num_leaves * sizeof(Word), stream)) return error;
    if (Error error = fill(driver, table + digest_scratch_offset(num_leaves), 0,
                           num_leaves * sizeof(DigestScratch), stream)) {
        return error;
    }
    Word count = num_leaves;
    void* parameters[] = {&table, &count, &digests};
    CuResult code = driver.launch(kernel.function, kernel.num_blocks, 1, 1, kDigestThreads, 1, 1, 0, stream,
                                  parameters, nullptr);
    return code == kCuSuccess ? Error{} : driver.failure(code, "launch the kernel of digests");
}

// The calling thread must be in the device's context. Failures are not cached: the next call tries again.
Error kernel_of(const Driver& driver, int device, Kernel& out) {
    static auto* mutex = new std::mutex;
    static auto* kernels = new std::map<int, Kernel>;
    std::lock_guard lock(*mutex);
    auto found = kernels->find(device);
    if (found == kernels->end()) {
        Kernel made;
        if (Error error = load_kernel(driver, device, made)) return error;
        // Test the kernel: with a faulty compiler in the driver, the audit would discard every snapshot.
        auto launch = [&](CuStream stream, std::uint64_t table, std::size_t num_leaves,
                          std::uint64_t digests) {
            return enqueue(driver, made, stream, table, num_leaves, digests);
        };
        if (Error error = try_digests(driver, launch)) return error;
        found = kernels->emplace(device, made).first;
    }
    out = found->second;
    return {};
}

} // namespace

Error cuda_digests_usable(int device) {
    const Driver* driver = nullptr;
    if (Error error = need_driver(driver)) return error;
    Entered entered;
    if (Error error = entered.enter(*driver, device)) return error;
    Kernel kernel;
    return kernel_of(*driver, device, kernel);
}

Error cuda_digest_launch(std::uint64_t stream, std::uint64_t table, std::size_t num_leaves,
                         std::uint64_t digests, int device) {
    if (num_leaves == 0) return {};
    if (table == 0 || table % 16 != 0) return value_error("the table must be at a multiple of 16");
    if (digests == 0 || digests % 8 != 0) return value_error("digests must be at a multiple of 8");
    const Driver* driver = nullptr;
    if (Error error = need_driver(driver)) return error;
    Entered entered;
    if (Error error = entered.enter(*driver, device)) return error;
    Kernel kernel;
    if (Error error = kernel_of(*driver, device, kernel)) return error;
    return enqueue(*driver, kernel, reinterpret_cast<CuStream>(stream), table, num_leaves, digests);
}

} // namespace flashckpt
