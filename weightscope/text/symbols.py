"""GPT-2's spelling of bytes: a printable byte is its Latin-1 character, the others follow from U+0100 on."""


def _bytes_of_symbols() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTES = _bytes_of_symbols()
SYMBOLS = {byte: symbol for symbol, byte in BYTES.items()}


def bytes_of(token: str) -> bytes:
    """The bytes of a token in GPT-2's spelling; an added token may be plain text instead."""
    if all(symbol in BYTES for symbol in token):
        return bytes(BYTES[symbol] for symbol in token)
    return token.encode()


def symbols_of(text: str) -> str:
    """A text in GPT-2's spelling."""
    return "".join(SYMBOLS[byte] for byte in text.encode(errors="surrogatepass"))
