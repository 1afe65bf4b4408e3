// Copies of page runs between two areas of memory.
//
// Many bytes are written past the caches, with non-temporal stores. A cached store reads the line first, so
// that a copy moves three bytes for each byte of its own; and what is copied (pages of a megabyte) would
// displace the weights that the forwards beside it use. Few bytes are copied by memcpy, which leaves them in
// the cache for whoever reads them next.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int64_t kStreamedBytes = 1 << 20;  // an L2 cache

#if defined(__x86_64__)

constexpr int64_t kLine = 64;

// `Hint` and `Ahead` (bytes) of prefetches from the source.
template <_mm_hint Hint, int64_t Ahead>
__attribute__((target("avx2"))) void stream_with(char *target, const char *source, int64_t bytes) {
    int64_t head = -reinterpret_cast<intptr_t>(target) & (kLine - 1);
    if (head > bytes) head = bytes;
    std::memcpy(target, source, head);
    int64_t at = head;
    for (; at + kLine <= bytes; at += kLine) {
        _mm_prefetch(source + at + Ahead, Hint);
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(source + at));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(source + at + 32));
        _mm256_stream_si256(reinterpret_cast<__m256i *>(target + at), low);
        _mm256_stream_si256(reinterpret_cast<__m256i *>(target + at + 32), high);
    }
    std::memcpy(target + at, source + at, bytes - at);
}

// With NTA Intel's CPUs copy no faster than memcpy does. It is what was measured on AMD's, with success
// (docs/decisions/0055).
void stream(char *target, const char *source, int64_t bytes) {
    static const bool is_intel = __builtin_cpu_is("intel");
    if (is_intel)
        stream_with<_MM_HINT_T1, 2048>(target, source, bytes);
    else
        stream_with<_MM_HINT_NTA, 1024>(target, source, bytes);
}

bool can_stream() { return __builtin_cpu_supports("avx2"); }
void finish() { _mm_sfence(); }  // the streamed bytes are seen by whoever is told that the copy is done

#else

void stream(char *target, const char *source, int64_t bytes) { std::memcpy(target, source, bytes); }
bool can_stream() { return false; }
void finish() {}

#endif

}  // namespace

// Run i is `length[i]` pages from page `source_page[i]` of `source` to page `target_page[i]` of `target`.
extern "C" void copy_runs(const char *source, const int64_t *source_page, char *target,
                          const int64_t *target_page, const int64_t *length, int64_t runs,
                          int64_t page_bytes) {
    int64_t pages = 0;
    for (int64_t i = 0; i < runs; i++) pages += length[i];
    const bool streamed = pages * page_bytes >= kStreamedBytes && can_stream();
    for (int64_t i = 0; i < runs; i++) {
        char *to = target + target_page[i] * page_bytes;
        const char *from = source + source_page[i] * page_bytes;
        if (streamed)
            stream(to, from, length[i] * page_bytes);
        else
            std::memcpy(to, from, length[i] * page_bytes);
    }
    if (streamed) finish();
}
