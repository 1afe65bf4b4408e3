// As much of MessagePack as the fake worker reads and writes.

#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace msgpack {

// Reads one value after the other. Throws std::runtime_error where something else stands, or nothing more.
class Reader {
   public:
    explicit Reader(std::string_view data) : data_(data) {}

    size_t map() { return container(0x80, 0xde); }

    uint64_t integer() {
        const uint8_t tag = take();
        if (tag < 0x80) return tag;
        if (tag < 0xcc || tag > 0xcf) throw std::runtime_error("no unsigned integer");
        return number(size_t(1) << (tag - 0xcc));
    }

    // A string or bytes.
    std::string_view text() {
        const uint8_t tag = take();
        if ((tag & 0xe0) == 0xa0) return bytes(tag & 0x1f);
        if (tag >= 0xd9 && tag <= 0xdb) return bytes(number(size_t(1) << (tag - 0xd9)));
        if (tag >= 0xc4 && tag <= 0xc6) return bytes(number(size_t(1) << (tag - 0xc4)));
        throw std::runtime_error("no string");
    }

    void skip() {
        const uint8_t tag = peek();
        if (tag < 0x80 || (tag >= 0xcc && tag <= 0xcf)) return void(integer());
        if (tag >= 0xe0 || (tag >= 0xc0 && tag <= 0xc3)) return void(take());  // -32..-1, nil, booleans
        if ((tag >= 0x80 && tag < 0x90) || tag == 0xde || tag == 0xdf) return skip(2 * map());
        if ((tag >= 0x90 && tag < 0xa0) || tag == 0xdc || tag == 0xdd) return skip(container(0x90, 0xdc));
        if (tag == 0xca || tag == 0xcb || (tag >= 0xd0 && tag <= 0xd3)) {  // floats, signed integers
            take();
            return void(bytes(tag == 0xca ? 4 : tag == 0xcb ? 8 : size_t(1) << (tag - 0xd0)));
        }
        text();
    }

   private:
    void skip(size_t count) {
        while (count-- > 0) skip();
    }

    size_t container(uint8_t small, uint8_t large) {
        const uint8_t tag = take();
        if ((tag & 0xf0) == small) return tag & 0x0f;
        if (tag != large && tag != large + 1) throw std::runtime_error("no map or array");
        return number(tag == large ? 2 : 4);
    }

    uint8_t peek() const {
        if (data_.empty()) throw std::runtime_error("the message ends early");
        return uint8_t(data_.front());
    }

    uint8_t take() {
        const uint8_t tag = peek();
        data_.remove_prefix(1);
        return tag;
    }

    std::string_view bytes(uint64_t count) {
        if (count > data_.size()) throw std::runtime_error("the message ends early");
        const std::string_view taken = data_.substr(0, count);
        data_.remove_prefix(count);
        return taken;
    }

    uint64_t number(size_t size) {
        uint64_t value = 0;
        for (const char byte : bytes(size)) value = value << 8 | uint8_t(byte);
        return value;
    }

    std::string_view data_;
};

// Writes one value after the other.
class Writer {
   public:
    Writer& map(uint8_t count) { return byte(0x80 | count); }      // at most 15 pairs
    Writer& array(uint8_t count) { return byte(0x90 | count); }    // at most 15 values
    Writer& integer(uint64_t value) {
        if (value < 0x80) return byte(uint8_t(value));
        byte(0xcf);
        for (int shift = 56; shift >= 0; shift -= 8) byte(uint8_t(value >> shift));
        return *this;
    }
    Writer& text(std::string_view value) {  // at most 255 bytes
        if (value.size() < 32) {
            byte(uint8_t(0xa0 | value.size()));
        } else {
            byte(0xd9).byte(uint8_t(value.size()));
        }
        return raw(value);
    }
    Writer& raw(std::string_view encoded) {
        out_.append(encoded);
        return *this;
    }
    std::string_view written() const { return out_; }

   private:
    Writer& byte(uint8_t value) {
        out_.push_back(char(value));
        return *this;
    }

    std::string out_;
};

}  // namespace msgpack
