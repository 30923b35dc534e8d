import com.google.gson.JsonObject
import com.google.gson.JsonParser
import java.lang.reflect.Field
import java.lang.reflect.Method
import java.nio.file.Files
import java.nio.file.Path
import java.nio.file.Paths
import java.nio.file.attribute.PosixFilePermissions
import java.security.SecureRandom
import java.time.Instant
import org.pytorch.serve.util.TokenAuthorization

/** The keys of key_file.json, which TorchServe 0.12 replaces at each start: they stay what they were. */
class Keys {
    private static final FIELDS = [management: 'managementKey', inference: 'inferenceKey', API: 'apiKey']
    private static final Path FILE = Paths.get(System.getProperty('user.dir'), 'key_file.json')

    /** The keys of the server before this one; new ones where there was none, or the file is not whole. */
    static Map<String, String> read() {
        try {
            JsonObject file = JsonParser.parseString(Files.readString(FILE)).getAsJsonObject()
            Map<String, String> keys = FIELDS.collectEntries { kind, field ->
                [kind, file.getAsJsonObject(kind).get('key').getAsString()]
            }
            if (keys.values().every { it ==~ /[\w=-]{8,200}/ } && keys.values().toSet().size() == FIELDS.size()) {
                return keys
            }
        } catch (IOException | RuntimeException ignored) {
            // As on a first start.
        }
        SecureRandom random = new SecureRandom()
        return FIELDS.collectEntries { kind, field ->
            byte[] bytes = new byte[24]  // TorchServe's have 6
            random.nextBytes(bytes)
            [kind, Base64.getUrlEncoder().encodeToString(bytes)]
        }
    }

    /** Put keys in the place of those that TorchServe has just made, with a new time to live. */
    static void install(Map<String, String> keys) {
        if (!TokenAuthorization.isEnabled()) {
            return
        }
        Method expiration = TokenAuthorization.getDeclaredMethod('generateTokenExpiration')
        expiration.setAccessible(true)
        JsonObject file = new JsonObject()
        FIELDS.each { kind, name ->
            set(name, keys[kind])
            JsonObject entry = new JsonObject()
            entry.addProperty('key', keys[kind])
            if (kind != 'API') {
                Instant end = (Instant) expiration.invoke(null)
                set("${kind}ExpirationTimeMinutes", end)
                entry.addProperty('expiration time', end.toString())
            }
            file.add(kind, entry)
        }
        Path written = FILE.resolveSibling('.key_file.json')
        Files.deleteIfExists(written)
        Files.createFile(written, PosixFilePermissions.asFileAttribute(PosixFilePermissions.fromString('rw-------')))
        Files.writeString(written, file.toString())
        Files.move(written, FILE, java.nio.file.StandardCopyOption.ATOMIC_MOVE)
    }

    private static void set(String name, Object value) {
        Field field = TokenAuthorization.getDeclaredField(name)
        field.setAccessible(true)
        field.set(null, value)
    }
}
