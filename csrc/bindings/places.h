// The place of an object of the state: `container[key]`, or an attribute. Owns how a place is read without
// changing it, as item access of a defaultdict would.
#pragma once

#include "bindings/arguments.h"

namespace flashckpt {

enum class Access { dict, list, attribute, item };

class Place {
  public:
    // Reads the stored item of a dict or a list, even if a subclass overrides item access.
    static Place stored(nb::handle container, nb::handle key);
    // Reads by Python's item access, but never calls `__missing__` for an absent key.
    static Place asked(nb::handle container, nb::handle key);

    // The current object; invalid if no object is left or after a Python error.
    Held current() const;

    Access access() const { return access_; }
    nb::handle container() const { return container_.ptr(); }
    nb::handle key() const { return key_.ptr(); }

    int traverse(visitproc visit, void* arg) const {
        Py_VISIT(container_.ptr());
        Py_VISIT(key_.ptr());
        return 0;
    }

  private:
    Place(nb::handle container, nb::handle key, Access access);

    Held container_;
    Held key_;
    Access access_;
    Py_ssize_t index_ = 0;
};

} // namespace flashckpt
