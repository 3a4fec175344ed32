// Memory of slots, and its mappings.
#include "bindings/arguments.h"

#include "base/posix.h"
#include "device/cuda.h"
#include "memory/pages.h"

#include <unistd.h>

namespace flashckpt {
namespace {

void allocate(int fd, std::uint64_t offset, std::uint64_t num_bytes) {
    Error error;
    {
        Released released;
        error = reserve(fd, offset, num_bytes, "");
    }
    raise_if(error);
}

void set_node(int fd, std::uint64_t num_bytes, int node) {
    Error error;
    {
        Released released;
        error = prefer_node(fd, num_bytes, node);
    }
    raise_if(error);
}

bool allocate_huge(int fd, std::uint64_t offset, std::uint64_t num_bytes) {
    bool taken = false;
    Error error;
    {
        Released released;
        error = take_huge_pages(fd, offset, num_bytes, taken);
    }
    raise_if(error);
    return taken;
}

void fault_in(std::uint64_t address, std::uint64_t num_bytes, int threads) {
    if (threads < 1) raise_value("threads must be at least 1");
    Error error;
    {
        Released released;
        error = populate(address, num_bytes, threads);
    }
    raise_if(error);
}

// The mapping of a region, of a part of a region (read-only), or of private memory, as a buffer. It lives as
// long as its last view.
class Region {
  public:
    Region(int fd, std::uint64_t num_bytes) { raise_if(Mapping::region(fd, 0, num_bytes, mapping_)); }
    Region(int fd, std::uint64_t offset, std::uint64_t num_bytes) : is_readonly_(true) {
        Error error;
        {
            Released released; // faults in all pages
            error = Mapping::shared(fd, offset, num_bytes, false, mapping_);
        }
        raise_if(error);
    }
    explicit Region(std::uint64_t num_bytes) { raise_if(Mapping::anonymous(num_bytes, mapping_)); }
    ~Region() { drop(); }
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    int view(PyObject* self, Py_buffer* out, int flags) {
        if (mapping_.data() == nullptr) return refuse(out, "this mapping was closed");
        if (is_forked()) return refuse(out, "this mapping is another process's, which has forked this one");
        auto size = static_cast<Py_ssize_t>(mapping_.size());
        if (PyBuffer_FillInfo(out, self, mapping_.data(), size, is_readonly_, flags) != 0) return -1;
        ++views_;
        return 0;
    }
    void release() { --views_; }

    // Page-locks the mapping for every device, once; parts that the driver refuses stay pageable. Every path
    // unregisters before it unmaps: if pages stayed registered and the address were reused, later copies
    // would go to freed memory.
    void register_with(int device) {
        if (mapping_.data() == nullptr) raise_value("this mapping was closed");
        if (is_forked()) raise_value("this mapping is another process's, which has forked this one");
        if (is_registered_) return;
        Error error;
        std::uint64_t num_registered = 0;
        ++views_; // it must not be closed meanwhile
        {
            Released released;
            error = cuda_register(address(), mapping_.size(), device, num_registered);
        }
        --views_;
        is_registered_ = is_registered_ || num_registered > 0;
        raise_if(error);
    }

    void close() {
        if (views_ > 0) throw nb::buffer_error("this mapping is viewed");
        drop();
    }

    static int refuse(Py_buffer* out, const char* reason) {
        if (out != nullptr) out->obj = nullptr;
        PyErr_SetString(PyExc_ValueError, reason);
        return -1;
    }

  private:
    // A forked child has this object but not its memory: its address may have other contents there.
    bool is_forked() const { return ::getpid() != maker_; }

    void drop() {
        Mapping gone = std::move(mapping_);
        if (is_forked()) gone.forget();
        if (gone.data() == nullptr) return;
        // Takes a second for 8 GiB in small pages, so release the GIL.
        Released released;
        // At the end of a process the driver may have ended and refuses; then nothing is registered any more.
        if (is_registered_) (void)cuda_unregister(reinterpret_cast<std::uint64_t>(gone.data()));
        gone = Mapping();
    }
    std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(mapping_.data()); }

    const pid_t maker_ = ::getpid();
    const bool is_readonly_ = false;
    Mapping mapping_;
    std::size_t views_ = 0;
    bool is_registered_ = false;
};

int get_view(PyObject* self, Py_buffer* out, int flags) {
    if (!nb::inst_ready(self)) return Region::refuse(out, "this mapping was never made");
    return nb::inst_ptr<Region>(self)->view(self, out, flags);
}

void release_view(PyObject* self, Py_buffer*) {
    nb::inst_ptr<Region>(self)->release();
}

PyType_Slot slots[] = {
    {Py_bf_getbuffer, reinterpret_cast<void*>(get_view)},
    {Py_bf_releasebuffer, reinterpret_cast<void*>(release_view)},
    {0, nullptr},
};

} // namespace

void bind_memory(nb::module_& module) {
    module.def("huge_page", huge_page);
    module.def("allocate", allocate, nb::arg("fd"), nb::arg("offset"), nb::arg("num_bytes"));
    module.def("allocate_huge", allocate_huge, nb::arg("fd"), nb::arg("offset"), nb::arg("num_bytes"));
    module.def("prefer_node", set_node, nb::arg("fd"), nb::arg("num_bytes"), nb::arg("node"));
    module.def("populate", fault_in, nb::arg("address"), nb::arg("num_bytes"), nb::arg("threads"));
    nb::class_<Region>(module, "Mapping", nb::type_slots(slots))
        .def(nb::init<int, std::uint64_t>(), nb::arg("fd"), nb::arg("num_bytes"))
        .def(nb::init<int, std::uint64_t, std::uint64_t>(), nb::arg("fd"), nb::arg("offset"),
             nb::arg("num_bytes"))
        .def(nb::init<std::uint64_t>(), nb::arg("num_bytes"))
        .def("register", &Region::register_with, nb::arg("device"))
        .def("close", &Region::close);
}

} // namespace flashckpt
